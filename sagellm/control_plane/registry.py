"""Find kinds of engines, routers and scaling policies by name: files of a folder, installed packages, `module:Class`."""

from typing import Any

from sagellm.control_plane.base import EngineKind, Router, ScalingPolicy
from sagellm.core.errors import ConfigError, PolicyError
from sagellm.core.registry import Registry

__all__ = ["ENGINE_KINDS", "ROUTERS", "SCALERS", "make_engine", "make_router", "make_scaler"]

ENGINE_KINDS: Registry[EngineKind] = Registry(
    "engine kind", EngineKind, ConfigError, "sagellm.engine_kinds", folder="sagellm.control_plane.kinds"
)
ROUTERS: Registry[Router] = Registry("router", Router, PolicyError, "sagellm.routers", folder="sagellm.control_plane.routers")
SCALERS: Registry[ScalingPolicy] = Registry(
    "scaling policy", ScalingPolicy, PolicyError, "sagellm.scaling", folder="sagellm.control_plane.scalers"
)


def make_engine(kind: str, **options: Any) -> EngineKind:
    """Return an engine that is not started. Raises ConfigError: unknown kind or option, or an invalid value."""
    return ENGINE_KINDS.make(ENGINE_KINDS.find(kind), kind, **options)


def make_router(name: str, **options: Any) -> Router:
    """Raises PolicyError: unknown router or option, or an invalid value."""
    return ROUTERS.make(ROUTERS.find(name), name, **options)


def make_scaler(name: str, **options: Any) -> ScalingPolicy:
    """Raises PolicyError: unknown scaling policy or option, or an invalid value."""
    return SCALERS.make(SCALERS.find(name), name, **options)
