"""Finds speculative strategies by name: those of this package, those that installed packages offer, and `module:Class`."""

from typing import Any

from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.accel.speculative.ngram import NgramStrategy
from sagellm.core.errors import SpeculationError
from sagellm.core.registry import Registry

__all__ = ["find_strategy", "make_strategy", "strategy_names"]

_STRATEGIES = Registry(
    "speculative strategy", SpeculativeStrategy, SpeculationError, "sagellm.speculative", (NgramStrategy,),
    prompt_lookup="ngram",
)  # fmt: skip


def strategy_names() -> list[str]:
    """Names that `find_strategy` knows."""
    return _STRATEGIES.names()


def find_strategy(name: str) -> type[SpeculativeStrategy]:
    """The class of that name, or of `module:Class`. Raises SpeculationError: unknown, cannot be loaded, or no strategy."""
    return _STRATEGIES.find(name)


def make_strategy(name: str, /, **options: Any) -> SpeculativeStrategy:
    """Raises SpeculationError: as `find_strategy`; bad options."""
    return _STRATEGIES.make(find_strategy(name), name, **options)
