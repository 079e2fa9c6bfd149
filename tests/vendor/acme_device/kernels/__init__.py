"""Kernels of the vendor, by the name of LMDeploy's operator type."""

from acme_device.kernels.gated import GatedBuilder

BUILDERS = {"SiluAndMul": GatedBuilder}
