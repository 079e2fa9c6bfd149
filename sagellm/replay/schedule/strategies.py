"""Which strategies a replay runs, by name."""

from typing import Any

from sagellm.core.errors import PlanError
from sagellm.core.registry import load_object
from sagellm.replay.schedule.base import ENGINE, RecordedRun
from sagellm.scheduler_ir.from_views import StrategyFromViews
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategy_plugin import StrategyPlugin

__all__ = ["build_strategy", "strategy_of_log"]

# Decisions of these are their strategy's, except while a plan is active.
PLUG_INS = frozenset(f"{kind.__module__}:{kind.__qualname__}" for kind in (StrategyPlugin, StrategyFromViews))


def build_strategy(name: str, options: dict[str, Any]) -> SchedulingStrategy | None:
    """A fresh object for one run; None for `engine`, the engine's own choice.

    Raises:
        PlanError: an unknown name, something that is no strategy, or options that it does not take.
    """
    if name == ENGINE:
        if options:
            raise PlanError(f"{ENGINE} takes no options; got {', '.join(sorted(options))}.")
        return None
    if ":" not in name:
        from sagellm.scheduler_ir.strategies.registry import make_strategy

        return make_strategy(name, **options)
    kind = load_object(name, "strategy", PlanError)
    if not (isinstance(kind, type) and issubclass(kind, SchedulingStrategy)):
        raise PlanError(f"{name} is {kind!r}; a strategy is a subclass of sagellm.scheduler_ir's SchedulingStrategy.")
    try:
        return kind(**options)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(f"strategy {name} cannot be built with options {options}: {error}") from error


def strategy_of_log(log: RecordedRun) -> tuple[str, dict[str, Any]]:
    """(name, options) of what decided in a log: the strategy of a `StrategyPlugin`, or else the plug-in itself."""
    for spec in log.plugins:
        options = spec.get("options")
        if spec.get("name") != log.decided_by or log.decided_by not in PLUG_INS or type(options) is not dict:
            continue
        if type(options.get("strategy")) is str:
            given = options.get("options", {})
            return options["strategy"], given if type(given) is dict else {}
    return log.decided_by, {}
