"""A baseline: whole requests of one model at a time."""

from sagellm.core.hooks import ScheduleDecision, StepView
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy


class ByModel(SchedulingStrategy):
    """Serves the model of the oldest request until none of its requests is left, then the next one.

    So engines do that scale models up and down by whole requests (ServerlessLLM, Fu et al., OSDI 2024).
    """

    name = "by_model"

    def __init__(self) -> None:
        self._adapter: str | None = None

    def decide(self, view: StepView) -> ScheduleDecision | None:
        by_arrival = sorted(view.requests, key=lambda request: request.arrival_s)
        if not by_arrival:
            return None
        if all(request.adapter != self._adapter for request in by_arrival):
            self._adapter = by_arrival[0].adapter
        ours = [request.request_id for request in by_arrival if request.adapter == self._adapter]
        others = [request.request_id for request in by_arrival if request.adapter != self._adapter]
        return ScheduleDecision([*ours, *others], frozenset(others), reason=f"turn of {self._adapter!r}")
