"""Plug-ins of the kit."""

from benchmarks.noop_plugin import NoOp
from sagellm.core.hooks import ScheduleDecision, StepView


class Raises(NoOp):
    """Fails whenever a step is to be decided."""

    def schedule(self, view: StepView) -> ScheduleDecision | None:
        raise RuntimeError("this plug-in always fails")
