"""Lowest number first, with ageing: waiting requests become more urgent, so that none starves."""

from sagellm.core.hooks import ScheduleDecision, StepView
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.options import check_number
from sagellm.scheduler_ir.strategies.ordering import smallest_first

__all__ = ["Priority"]


class Priority(SchedulingStrategy):
    """Each `ageing_s` seconds since its arrival are worth one level of priority.

    All grow old at the same speed, so the order of two requests never changes: by arrival + priority * `ageing_s`. The bound
    on waiting follows: a request of priority p goes behind one of priority q < p only if that arrives less than
    (p - q) * `ageing_s` seconds later. After (p + 100) * `ageing_s` seconds no new request, of whatever priority, goes before
    it; it waits for those alone that are there.

    Memory is taken from the end of the order, from the least urgent. Prompts are computed at once where the most urgent
    request waits; else the engine chooses the phase.

    Args:
        ageing_s: from 0.001; small: nearly first come, first served; large: strict levels.
    """

    name = "priority"

    def __init__(self, *, ageing_s: float = 5.0) -> None:
        self.ageing_s = check_number(self.name, "ageing_s", ageing_s, 1e-3)

    def decide(self, view: StepView) -> ScheduleDecision:
        ageing_s = self.ageing_s
        return smallest_first(
            view, lambda request: request.arrival_s + request.service.priority * ageing_s, "by priority and age", True
        )
