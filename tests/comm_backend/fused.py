"""Fusions that are made from a configuration, as the contract makes backends, and close what is below them."""

from sagellm.comm_backend import CommFusion
from sagellm.comm_backend.memory import MemoryBackend
from sagellm.comm_backend.shm import ShmBackend
from sagellm.comm_backend.torch_groups import GlooBackend


class _Fused(CommFusion):
    def __init__(self, config):
        super().__init__(self.below(config.model_copy(update={"backend": self.below.name})))

    def _close(self):
        super()._close()
        self.backend.close()


class FusedMemory(_Fused):
    below = MemoryBackend
    name, schemes, device_types, detects_mismatch = "fused-memory", ("memory",), MemoryBackend.device_types, True


class FusedGloo(_Fused):
    below = GlooBackend
    name, device_types = "fused-gloo", GlooBackend.device_types


class FusedShm(_Fused):
    below = ShmBackend
    name, detects_mismatch = "fused-shm", True
