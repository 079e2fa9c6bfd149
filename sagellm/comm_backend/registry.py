"""Find collective backends by name."""

from sagellm.comm_backend.base import CommBackendProtocol
from sagellm.comm_backend.config import CommConfig
from sagellm.comm_backend.domestic.groups import BkclBackend, CnclBackend, HcclBackend, McclBackend, RcclBackend
from sagellm.comm_backend.memory import MemoryBackend
from sagellm.comm_backend.shm import ShmBackend
from sagellm.comm_backend.torch_groups import GlooBackend, NcclBackend
from sagellm.core.errors import CommError
from sagellm.core.registry import Registry

__all__ = ["BACKENDS", "backend_names", "find_backend", "make_backend"]

GROUP = "sagellm.comm_backends"
OWN = (
    MemoryBackend, GlooBackend, NcclBackend, ShmBackend, RcclBackend, HcclBackend, CnclBackend, BkclBackend, McclBackend,
)  # fmt: skip
BACKENDS = Registry("communication backend", CommBackendProtocol, CommError, GROUP, OWN, num_given=1)
backend_names = BACKENDS.names
find_backend = BACKENDS.find


def make_backend(config: CommConfig) -> CommBackendProtocol:
    """Join the group of the configuration. Raises CommError if the backend is unknown or cannot join."""
    return BACKENDS.make(find_backend(config.backend), config.backend, config)
