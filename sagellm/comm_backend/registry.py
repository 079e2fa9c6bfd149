"""Backends by name."""

from sagellm.comm_backend.base import CommBackendProtocol
from sagellm.comm_backend.config import CommConfig
from sagellm.comm_backend.memory import MemoryBackend
from sagellm.comm_backend.shm import ShmBackend
from sagellm.comm_backend.torch_groups import GlooBackend, NcclBackend
from sagellm.comm_backend.vendor_groups import BkclBackend, CnclBackend, HcclBackend, RcclBackend
from sagellm.core.errors import CommError
from sagellm.core.registry import Registry

__all__ = ["backend_names", "find_backend", "make_backend"]

GROUP = "sagellm.comm_backends"
OWN = (MemoryBackend, GlooBackend, NcclBackend, ShmBackend, RcclBackend, HcclBackend, CnclBackend, BkclBackend)
_REGISTRY = Registry("communication backend", CommBackendProtocol, CommError, GROUP, OWN)


def backend_names() -> list[str]:
    """Those of the project, then those that installed packages offer."""
    return _REGISTRY.names()


def find_backend(name: str) -> type[CommBackendProtocol]:
    """Raises CommError: unknown, cannot be loaded, or none."""
    return _REGISTRY.find(name)


def make_backend(config: CommConfig) -> CommBackendProtocol:
    """Join the group of the configuration. Raises CommError, as the backend does."""
    return _REGISTRY.make(find_backend(config.backend), config.backend, config)
