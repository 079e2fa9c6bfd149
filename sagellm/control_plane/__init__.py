"""Many engines of many kinds behind one address: a registry, a health check, a router and an OpenAI gateway."""

from sagellm.core.late_imports import late_imports

_HOME = {
    "BaseService": "base",
    "Candidates": "base",
    "ControlPlaneManager": "manager",
    "EngineKind": "base",
    "EngineView": "base",
    "PoolView": "base",
    "RouteChoice": "base",
    "RouteRequest": "base",
    "Router": "base",
    "ScalingDecision": "base",
    "ScalingPolicy": "base",
    "UnifiedInferenceClient": "client",
}

__all__ = sorted(_HOME)

__getattr__, __dir__ = late_imports(__name__, _HOME)
