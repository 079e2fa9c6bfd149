"""Scenarios. A component scenario is one file of this folder, found by its name."""

import importlib
import pkgutil
from typing import Any, Protocol

from benchmarks.errors import BenchmarkError
from benchmarks.result import Definition

NO_COMPONENTS = frozenset({"serve", "__main__"})


class ComponentScenario(Protocol):
    """A module of this folder. Its name is the scenario's name.

    Attributes:
        DEFINITIONS: what each metric means; the names begin with the scenario's.
        OPTIONS: options and their defaults; a config may change them, others are refused.
    """

    DEFINITIONS: dict[str, Definition]
    OPTIONS: dict[str, Any]

    def run(self, seed: int, **options: Any) -> dict[str, float]:
        """Measure once. Called once a round for each contestant, in a process of its own."""
        ...


def component_names() -> list[str]:
    return sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name not in NO_COMPONENTS)


def component(name: str, options: dict[str, Any]) -> ComponentScenario:
    """Raises BenchmarkError for an unknown scenario or option, listing the known ones."""
    known = component_names()
    if name not in known:
        raise BenchmarkError(f"scenario {name!r} is unknown; known are serve, {', '.join(known)}")
    module = importlib.import_module(f"benchmarks.scenarios.{name}")
    unknown = sorted(options.keys() - module.OPTIONS.keys())
    if unknown:
        allowed = ", ".join(module.OPTIONS) or "none"
        raise BenchmarkError(f"scenario {name} has no options {', '.join(unknown)}; allowed: {allowed}")
    return module
