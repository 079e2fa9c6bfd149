"""Find kinds of engines and routers by name: the files of `kinds/` and `routers/`, installed packages, `module:Class`."""

from typing import Any

from sagellm.control_plane.base import EngineKind, Router
from sagellm.core.errors import ConfigError, PolicyError
from sagellm.core.registry import Registry

__all__ = ["ENGINE_KINDS", "ROUTERS", "make_engine", "make_router"]

ENGINE_KINDS: Registry[EngineKind] = Registry(
    "engine kind", EngineKind, ConfigError, "sagellm.engine_kinds", folder="sagellm.control_plane.kinds"
)
ROUTERS: Registry[Router] = Registry("router", Router, PolicyError, "sagellm.routers", folder="sagellm.control_plane.routers")


def make_engine(kind: str, **options: Any) -> EngineKind:
    """Return an engine that is not started. Raises ConfigError: unknown kind or option, or an invalid value."""
    return ENGINE_KINDS.make(ENGINE_KINDS.find(kind), kind, **options)


def make_router(name: str, **options: Any) -> Router:
    """Raises PolicyError: unknown router or option, or an invalid value."""
    return ROUTERS.make(ROUTERS.find(name), name, **options)
