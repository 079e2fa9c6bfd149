"""The strategy that the options of a plug-in name."""

from typing import Any

from sagellm.core.errors import PlanError
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["given_strategy"]


def given_strategy(
    strategy: str | SchedulingStrategy, options: dict[str, Any] | None, name: str = "options"
) -> SchedulingStrategy:
    """A strategy by name, as `module:Class`, or built already. `options` are those of its constructor, called `name` in
    messages.

    Raises:
        PlanError: an unknown strategy, an object that is no strategy, invalid options, or options for one that is built.
    """
    if options is not None and not isinstance(options, dict):
        raise PlanError(f"{name} {options!r}; give an object of names and values.")
    if isinstance(strategy, str):
        # Many modules, of which an instance that is given needs none.
        from sagellm.scheduler_ir.strategies.registry import make_strategy

        return make_strategy(strategy, **(options or {}))
    if not isinstance(strategy, SchedulingStrategy):
        raise PlanError(f"strategy {strategy!r}; give a name, module:Class, or a SchedulingStrategy.")
    if options:
        raise PlanError(f"{name} {options!r} for a strategy that is built already; give them to its constructor.")
    return strategy
