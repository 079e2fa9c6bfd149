"""The operators of the device: its own kernels, and those of the CPU device for the rest."""

from acme_device.kernels import BUILDERS

from sagellm.engines.lmdeploy.cpu.backend import CpuOpsBackend


class AcmeOpsBackend(CpuOpsBackend):
    @staticmethod
    def get_name():
        return "acme"

    @staticmethod
    def init():
        from lmdeploy import sage_device

        sage_device.activate("acme")

    @classmethod
    def get_layer_impl_builder(cls, layer_type):
        return BUILDERS.get(layer_type.name) or super().get_layer_impl_builder(layer_type)
