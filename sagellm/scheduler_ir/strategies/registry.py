"""Find scheduling strategies by name: the files of this package, installed packages, and `module:Class`."""

from typing import Any

from sagellm.core.errors import PlanError
from sagellm.core.registry import Registry
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["STRATEGIES", "find_strategy", "make_strategy", "strategy_names"]

STRATEGIES = Registry(
    "strategy", SchedulingStrategy, PlanError, "sagellm.strategies", folder=__package__,
    aliases={"fcfs": "fifo", "slo": "slo_aware", "sjf": "shortest", "vtc": "fair"},
)  # fmt: skip
strategy_names = STRATEGIES.names
find_strategy = STRATEGIES.find


def make_strategy(name: str, **options: Any) -> SchedulingStrategy:
    """Return a strategy. Raises PlanError if it is unknown or its options are invalid."""
    return STRATEGIES.make(find_strategy(name), name, **options)
