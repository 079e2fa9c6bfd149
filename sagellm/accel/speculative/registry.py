"""Finds speculative strategies by name: those of this package, those that installed packages offer, and `module:Class`."""

from typing import Any

from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.accel.speculative.draft_model import DraftModelStrategy
from sagellm.accel.speculative.dynamic import DynamicLookaheadStrategy
from sagellm.accel.speculative.ngram import NgramStrategy
from sagellm.accel.speculative.suffix import SuffixStrategy
from sagellm.core.errors import SpeculationError
from sagellm.core.registry import Registry

__all__ = ["ENGINE_METHODS", "engine_method", "find_strategy", "make_strategy", "strategy_names"]

# LMDeploy guesses by itself with these, on a GPU: there is no class of theirs here.
ENGINE_METHODS = ("eagle", "eagle3", "deepseek_mtp")


class _Strategies(Registry[SpeculativeStrategy]):
    def names(self) -> list[str]:
        return [*super().names(), *ENGINE_METHODS]


_STRATEGIES = _Strategies(
    "speculative strategy", SpeculativeStrategy, SpeculationError, "sagellm.speculative",
    (NgramStrategy, SuffixStrategy, DraftModelStrategy, DynamicLookaheadStrategy),
    promptlookup="ngram", draftmodel="draft",
)  # fmt: skip


def strategy_names() -> list[str]:
    """Names of strategies and of the engine's own methods."""
    return _STRATEGIES.names()


def engine_method(name: str | None) -> str | None:
    """The method of LMDeploy's own engine that `name` stands for, capitals, `-` and `_` aside; None: it is none."""
    plain = (name or "").lower().replace("-", "").replace("_", "")
    return next((method for method in ENGINE_METHODS if method.replace("_", "") == plain), None)


def find_strategy(name: str) -> type[SpeculativeStrategy]:
    """The class of that name, or of `module:Class`; that of `dynamic:NAME` is `DynamicLookaheadStrategy`.

    Raises SpeculationError: unknown, cannot be loaded, or no strategy.
    """
    if engine_method(name):
        raise SpeculationError(
            f"{name} is a method of LMDeploy's engine, not a strategy: it cannot be wrapped or checked; start a server on a "
            f"GPU with --speculative {engine_method(name)}."
        )
    inner = _inner_name(name)
    if inner is None:
        return _STRATEGIES.find(name)
    find_strategy(inner)
    return DynamicLookaheadStrategy


def make_strategy(name: str, /, **options: Any) -> SpeculativeStrategy:
    """Options of NAME in `dynamic:NAME` are in `options`. Raises SpeculationError: as `find_strategy`; bad options."""
    inner = _inner_name(name)
    if inner is not None:
        if "strategy" in options:
            raise SpeculationError(f"{name} with the option strategy {options['strategy']!r}; name it in one place.")
        options["strategy"] = inner
    return _STRATEGIES.make(find_strategy(name), name, **options)


def _inner_name(name: str) -> str | None:
    """NAME of `dynamic:NAME`; None: it is no such name."""
    first, colon, inner = name.partition(":")
    if not colon or first.strip().lower() != DynamicLookaheadStrategy.name:
        return None
    if not inner.strip():
        raise SpeculationError(f"{name!r} names nobody who guesses; give dynamic:NAME, such as dynamic:ngram.")
    return inner.strip()
