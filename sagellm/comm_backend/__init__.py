"""Collectives and messages among processes."""

from importlib import import_module
from typing import Any

_HOME = {
    "CommBackendProtocol": "base", "ReduceOp": "base", "Work": "base", "CommConfig": "config", "CommFusion": "fusion",
    "OverlapWindow": "overlap_window",
}  # fmt: skip

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    # Control messages need no tensors: what loads torch, for more than a second, is imported when it is asked for.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
