"""The executor for an engine that does not tell when a request ends, such as TurboMind."""

from typing import Any

from sagellm.core.hooks import Plugin, RequestId, ScheduleDecision, StepView
from sagellm.scheduler_ir.strategy_plugin import StrategyPlugin

__all__ = ["StrategyFromViews"]


class StrategyFromViews(StrategyPlugin):
    """`StrategyPlugin` that learns from views which requests have ended.

    A request of the last view of the whole batch that is not in this one has ended. It serves one batch at a time:
    data-parallel groups have views of their own, and would seem to end each other's requests.
    """

    on_request_end = Plugin.on_request_end  # not a hook of this plug-in, or the engine would refuse it

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._last_viewed: set[RequestId] = set()

    def schedule(self, view: StepView) -> ScheduleDecision | None:
        here = {request.request_id for request in view.requests}
        for request_id in sorted(self._last_viewed - here):
            StrategyPlugin.on_request_end(self, request_id)
        self._last_viewed = here
        return super().schedule(view)
