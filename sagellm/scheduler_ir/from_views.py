"""The scheduling plug-ins for an engine that does not tell when a request ends, such as TurboMind."""

from collections.abc import Callable
from typing import Any

from sagellm.core.hooks import Plugin, RequestId, ScheduleDecision, StepView
from sagellm.scheduler_ir.plan_runner import PlanRunner
from sagellm.scheduler_ir.strategy_plugin import StrategyPlugin

__all__ = ["PlanRunnerFromViews", "StrategyFromViews"]


class _Views:
    """Who was in the last view of the whole batch and is not in this one has ended. One batch at a time: data-parallel groups
    have views of their own, and would seem to end each other's requests."""

    def __init__(self) -> None:
        self._last: set[RequestId] = set()

    def tell_ends(self, view: StepView, on_request_end: Callable[[RequestId], None]) -> None:
        here = {request.request_id for request in view.requests}
        for request_id in sorted(self._last - here):
            on_request_end(request_id)
        self._last = here


class StrategyFromViews(StrategyPlugin):
    on_request_end = Plugin.on_request_end  # not a hook of this plug-in, or the engine would refuse it

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._views = _Views()

    def schedule(self, view: StepView) -> ScheduleDecision | None:
        self._views.tell_ends(view, super().on_request_end)
        return super().schedule(view)


class PlanRunnerFromViews(PlanRunner):
    on_request_end = Plugin.on_request_end

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._views = _Views()

    def schedule(self, view: StepView) -> ScheduleDecision | None:
        self._views.tell_ends(view, super().on_request_end)
        return super().schedule(view)
