"""Schedules as data: a graph of typed nodes, passes over it, plans that an engine carries out, and strategies that decide."""

from sagellm.core.late_imports import late_imports
from sagellm.scheduler_ir import passes as passes  # gives IRGraph.optimize its default passes

_HOME = {
    "ExecutionPlan": "plan", "ExecutorAPI": "plan", "IRBuilder": "builder", "IRGraph": "graph", "IRNode": "nodes",
    "PDSeparator": "pd_separator", "SchedulingStrategy": "strategies.base",
}  # fmt: skip

__all__ = sorted(_HOME)

__getattr__, __dir__ = late_imports(__name__, _HOME)
