"""The contract of a strategy: the whole queue in, a decision out. The same object in an engine and on a virtual clock."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from sagellm.core.hooks import RequestId, ScheduleDecision, StepResult, StepView

__all__ = ["SchedulingStrategy"]


class SchedulingStrategy(ABC):
    """Chooses each step. Write `decide`; the rest is for strategies that learn or keep accounts.

    Nothing here reads a clock or draws a random number that is not seeded: times come with views and results, so that a
    strategy decides the same when a log is run again. One thread at a time. Options are keyword arguments of the constructor,
    which raises PlanError for one that makes no sense.

    A decision names every request of the view once (`ScheduleDecision`); who shall not begin yet is held. It must not keep all
    of them waiting for ever: a request that is held for a minute counts as a fault. One that raises or answers nonsense is
    replaced by the engine's own scheduler in the same step; no request is lost.
    """

    name: ClassVar[str] = ""

    @abstractmethod
    def decide(self, view: StepView) -> ScheduleDecision | None:
        """How to go on; None leaves the step to the engine, which serves who came first. O(requests log requests)."""

    def on_step_end(self, result: StepResult) -> None:  # noqa: B027, strategies that keep no accounts need not
        """A step is done. `result.computed` says how many tokens of whom."""

    def on_request_end(self, request_id: RequestId) -> None:  # noqa: B027
        """It is complete, cancelled or failed, and will be in no view again."""

    def report(self) -> dict[str, Any]:
        """Numbers for `/metrics`, as `Plugin.report`."""
        return {}
