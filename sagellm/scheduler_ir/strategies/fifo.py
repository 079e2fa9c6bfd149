"""First come, first served: what the engine does by itself, said through the whole pipeline."""

from sagellm.core.hooks import ScheduleDecision, StepView
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["Fifo"]


class Fifo(SchedulingStrategy):
    """First come, first served; the engine chooses the phase, its own budget holds. Requests that arrived at the same time
    keep the engine's order. The measure of every other strategy, and what takes the place of one that fails."""

    name = "fifo"

    def decide(self, view: StepView) -> ScheduleDecision:
        ordered = sorted(view.requests, key=lambda request: request.arrival_s)
        return ScheduleDecision([request.request_id for request in ordered], reason="by arrival")
