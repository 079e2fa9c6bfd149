"""The device `acme`: the cores of this machine, as of a vendor that LMDeploy does not know."""

from lmdeploy.pytorch.devices import DeviceContext, get_device_manager

from sagellm.engines.lmdeploy.cpu.device import CpuDevice


class AcmeDevice(CpuDevice):
    """Cores of this machine."""

    vendor = "kunlun"

    def activate(self):
        super().activate()
        get_device_manager().set_context(DeviceContext(device_type="acme"))

    def ops_backend(self):
        from acme_device.backend import AcmeOpsBackend

        return AcmeOpsBackend


ACME_DEVICE = AcmeDevice()
