"""Finds strategies by name: those of this package, those that installed packages offer, and `module:Class`."""

from typing import Any

from sagellm.core.errors import PlanError
from sagellm.core.registry import Registry
from sagellm.scheduler_ir.strategies.adaptive import Adaptive
from sagellm.scheduler_ir.strategies.aegaeon import Aegaeon
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.fair import Fair
from sagellm.scheduler_ir.strategies.fifo import Fifo
from sagellm.scheduler_ir.strategies.hybrid import Hybrid
from sagellm.scheduler_ir.strategies.priority import Priority
from sagellm.scheduler_ir.strategies.shortest import Shortest
from sagellm.scheduler_ir.strategies.slo_aware import SloAware

__all__ = ["find_strategy", "make_strategy", "strategy_names"]

_STRATEGIES = Registry(
    "strategy", SchedulingStrategy, PlanError, "sagellm.strategies",
    (Fifo, Priority, SloAware, Adaptive, Aegaeon, Hybrid, Shortest, Fair),
    fcfs="fifo", slo="slo_aware", sjf="shortest", vtc="fair",
)  # fmt: skip


def strategy_names() -> list[str]:
    """Names that `find_strategy` knows; `fcfs`, `slo`, `sjf` and `vtc` are others for four of them."""
    return _STRATEGIES.names()


def find_strategy(name: str) -> type[SchedulingStrategy]:
    """The class of that name, or of `module:Class`.

    Raises:
        PlanError: unknown, cannot be loaded, or no strategy.
    """
    return _STRATEGIES.find(name)


def make_strategy(name: str, **options: Any) -> SchedulingStrategy:
    """Raises PlanError: as `find_strategy`; bad options."""
    return _STRATEGIES.make(find_strategy(name), name, **options)
