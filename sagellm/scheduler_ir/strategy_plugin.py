"""A strategy as a plug-in: what it decides becomes a graph, and the graph is what the engine is told."""

from dataclasses import replace
from typing import Any, Literal

from sagellm.core.errors import PlanError
from sagellm.core.hooks import EngineHandle, Plugin, RequestId, ScheduleDecision, StepResult, StepView
from sagellm.scheduler_ir.builder import IRBuilder
from sagellm.scheduler_ir.given_strategy import given_strategy
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.lowering import lower
from sagellm.scheduler_ir.passes import PassSettings
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["StrategyPlugin", "compact"]

RECORDS = ("compact", "full", "none")


class StrategyPlugin(Plugin):
    """Each step: `strategy.decide`, `IRBuilder.build`, `IRGraph.optimize`, `lower`. Where the strategy leaves a step to the
    engine there is no graph. One that raises is replaced by the engine's own scheduler in the same step.

    Writes lines `plan` into the engine's record, where one is kept: `step`, `strategy`, `reason`, and `nodes` or `graph`.

    Args:
        strategy: a name, `module:Class`, or an instance.
        options: keyword arguments of the strategy's constructor.
        record: `compact` rows (see `compact`), the `full` graph as `IRGraph.from_dict` reads it, or `none`.

    Raises:
        PlanError: an unknown strategy, or options that make no sense.
    """

    def __init__(
        self,
        strategy: str | SchedulingStrategy,
        options: dict[str, Any] | None = None,
        record: Literal["compact", "full", "none"] = "compact",
    ) -> None:
        if record not in RECORDS:
            raise PlanError(f"record={record!r}; give one of {', '.join(RECORDS)}.")
        self.strategy = given_strategy(strategy, options)
        self._record = record
        self._engine: EngineHandle | None = None
        self._settings = PassSettings()
        self._num_decisions = self._num_left = self._num_nodes = 0

    def attach(self, engine: EngineHandle) -> None:
        self._engine = engine

    def schedule(self, view: StepView) -> ScheduleDecision | None:
        decision = self.strategy.decide(view)
        if decision is None:
            self._num_left += 1
            return None
        if self._settings.max_batch_size != view.max_batch_size:
            self._settings = PassSettings(max_batch_size=view.max_batch_size)
        # Batches at once: the passes find nothing to merge, and make the same graph.
        graph = IRBuilder.build(view.requests, decision, decode_batch=view.max_batch_size).optimize(settings=self._settings)
        self._num_decisions += 1
        self._num_nodes += len(graph)
        self._write(view, decision, graph)
        # A graph says who does what, and when; why it is so the strategy knows.
        return replace(lower(graph, view), reason=decision.reason, reasons=decision.reasons)

    def on_step_end(self, result: StepResult) -> None:
        self.strategy.on_step_end(result)

    def on_request_end(self, request_id: RequestId) -> None:
        self.strategy.on_request_end(request_id)

    def report(self) -> dict[str, Any]:
        return {
            "decisions": self._num_decisions, "left_to_engine": self._num_left, "nodes": self._num_nodes,
            "strategy": self.strategy.report(),
        }  # fmt: skip

    def _write(self, view: StepView, decision: ScheduleDecision, graph: IRGraph) -> None:
        if self._record == "none" or self._engine is None or not self._engine.is_recording:
            return
        what = {"graph": graph.to_dict()} if self._record == "full" else {"nodes": compact(graph)}
        self._engine.record("plan", step=view.step, strategy=self.strategy.name, reason=decision.reason, **what)


def compact(graph: IRGraph) -> list[list[Any]]:
    """A row for each node, in the order of the graph: its type, its requests, and, of a range of tokens, start and number."""
    rows: list[list[Any]] = []
    for node in graph:
        row: list[Any] = [node.node_type.value, list(node.requests)]
        if "tokens" in node.config:
            row += [node.config.get("start", 0), node.config["tokens"]]
        rows.append(row)
    return rows
