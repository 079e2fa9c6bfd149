"""A device of a vendor: what its entry point names."""

from acme_device.device import ACME_DEVICE

__all__ = ["ACME_DEVICE"]
