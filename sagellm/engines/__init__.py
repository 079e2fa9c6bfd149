"""Adapters from the engine-neutral contracts of `sagellm.core` to real engines. The names below are imported on first use."""

from sagellm.core.late_imports import late_imports

_HOME = {
    "BaseEngine": "base",
    "CapabilityDescriptor": "base",
    "EngineInfo": "base",
    "KVCacheSchema": "base",
    "QuantizationProfile": "base",
    "SamplingParams": "base",
}

__all__ = sorted(_HOME)

__getattr__, __dir__ = late_imports(__name__, _HOME)
