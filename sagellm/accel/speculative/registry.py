"""Find speculative strategies by name: the files of this package, installed packages, `module:Class` and `dynamic:NAME`."""

from typing import Any

from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.core.config import ENGINE_METHODS
from sagellm.core.errors import SpeculationError
from sagellm.core.registry import Registry

__all__ = [
    "ENGINE_METHODS", "ENGINE_OPTIONS", "SPECULATORS", "engine_method", "find_speculator", "make_speculator",
    "speculator_names",
]  # fmt: skip

ENGINE_OPTIONS = ("model", "num_speculative_tokens")
DYNAMIC = "dynamic"


class _Speculators(Registry[SpeculativeStrategy]):
    def names(self) -> list[str]:
        """Return names of strategies, then of the engine's own methods."""
        return [*super().names(), *ENGINE_METHODS]

    def find(self, name: str) -> type[SpeculativeStrategy]:
        """Return the class of that name, or of `module:Class`; `DynamicLookaheadStrategy` for `dynamic:NAME`.

        Raises:
            SpeculationError: unknown, cannot be loaded, not a strategy, or a method of LMDeploy's engine.
        """
        if engine_method(name):
            raise SpeculationError(
                f"{name} is a method of LMDeploy's engine, not a strategy: it cannot be wrapped or checked; start a server "
                f"on a GPU with --speculative {engine_method(name)}."
            )
        inner = _inner_name(name)
        if inner is None:
            return super().find(name)
        self.find(inner)
        return super().find(DYNAMIC)

    def describe(self, name: str) -> dict[str, Any]:
        """Return facts for lists. The engine's own methods have a fixed set of options."""
        if engine_method(name):
            summary = "A method of LMDeploy's own engine, on a GPU: no strategy is asked."
            return {"options": dict.fromkeys(ENGINE_OPTIONS), "devices": "cuda", "here": "on a GPU",
                    "summary": summary, "class": None}  # fmt: skip
        return super().describe(name)


SPECULATORS = _Speculators(
    "speculative strategy", SpeculativeStrategy, SpeculationError, "sagellm.speculative", folder=__package__,
    aliases={"promptlookup": "ngram", "draftmodel": "draft"},
)  # fmt: skip
speculator_names = SPECULATORS.names
find_speculator = SPECULATORS.find


def engine_method(name: str | None) -> str | None:
    """Return the method of LMDeploy's own engine of that name, without regard to capitals, `-` and `_`; else None."""
    plain = (name or "").lower().replace("-", "").replace("_", "")
    return next((method for method in ENGINE_METHODS if method.replace("_", "") == plain), None)


def make_speculator(name: str, /, **options: Any) -> SpeculativeStrategy:
    """Return a strategy. `dynamic:NAME` takes the options of NAME as `options`.

    Raises:
        SpeculationError: the strategy cannot be found, or its options are invalid.
    """
    inner = _inner_name(name)
    if inner is not None:
        if "strategy" in options:
            raise SpeculationError(f"{name} with the option strategy {options['strategy']!r}; name it in one place.")
        options["strategy"] = inner
    return SPECULATORS.make(find_speculator(name), name, **options)


def _inner_name(name: str) -> str | None:
    """Return NAME of `dynamic:NAME`, None for other names."""
    first, colon, inner = name.partition(":")
    if not colon or first.strip().lower() != DYNAMIC:
        return None
    if not inner.strip():
        raise SpeculationError(f"{name!r} names no strategy; give dynamic:NAME, such as dynamic:ngram.")
    return inner.strip()
