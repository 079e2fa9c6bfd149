"""The executor of an engine: decisions of a strategy and plans from outside reach the engine through one plug-in."""

from typing import Any, Literal

from sagellm.core.errors import PlanError
from sagellm.core.hooks import ScheduleDecision, StepResult, StepView
from sagellm.scheduler_ir.builder import IRBuilder
from sagellm.scheduler_ir.given_strategy import given_strategy
from sagellm.scheduler_ir.graph import IRGraph
from sagellm.scheduler_ir.lowering import lower
from sagellm.scheduler_ir.outcomes import DecisionOutcomes
from sagellm.scheduler_ir.passes import PassSettings
from sagellm.scheduler_ir.plan_runner import PlanRunner
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["StrategyPlugin", "compact"]

RECORDS = ("compact", "full", "none")


class StrategyPlugin(PlanRunner):
    """Runs each step through `strategy.decide`, `IRBuilder.build`, `IRGraph.optimize` and `lower`.

    A step that the strategy leaves to the engine has no graph. A strategy that raises is replaced by the engine's own
    scheduler in the same step. While a plan is active (`submit_plan`), its nodes go first, and the strategy decides for the
    requests of no plan; see `PlanRunner`.

    Writes lines `plan` into the engine's record, if it keeps one: `step`, `strategy`, `reason`, and `nodes` or `graph`.

    Args:
        strategy: a name, `module:Class`, or an instance.
        options: keyword arguments of the strategy's constructor.
        record: `compact` rows (see `compact`), the `full` graph as `IRGraph.from_dict` reads it, or `none`.
        wait_for_requests: whether a plan may name requests that the engine does not have yet.
        plans: further options of `PlanRunner`.

    Raises:
        PlanError: an unknown strategy, or invalid options.
    """

    def __init__(
        self,
        strategy: str | SchedulingStrategy,
        options: dict[str, Any] | None = None,
        record: Literal["compact", "full", "none"] = "compact",
        wait_for_requests: bool = True,
        **plans: Any,
    ) -> None:
        if record not in RECORDS:
            raise PlanError(f"record={record!r}; give one of {', '.join(RECORDS)}.")
        self.strategy = given_strategy(strategy, options)
        super().__init__(strategy=self.strategy, wait_for_requests=wait_for_requests, **plans)
        self._record = record
        self._settings = PassSettings()
        self._outcomes = DecisionOutcomes()
        self._num_decisions = self._num_left = self._num_nodes = 0

    def schedule(self, view: StepView) -> ScheduleDecision | None:
        self.take_changes()
        decision = self._with_plans(view) if self._active else self._of_strategy(view)
        if decision is not None:
            self._outcomes.expect(view, decision)
        return decision

    def _with_plans(self, view: StepView) -> ScheduleDecision | None:
        decision = super().schedule(view)
        if decision is not None and self._records:
            self._engine.record("plan", step=view.step, strategy="plans", reason=decision.reason, nodes=self.running_nodes())
        return decision

    def _of_strategy(self, view: StepView) -> ScheduleDecision | None:
        if self._requests:  # the last plan is done: how far requests had come then says nothing of a later plan's
            self._requests.clear()
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
        return lower(graph, view, made_from=decision)

    def on_step_end(self, result: StepResult) -> None:
        self._outcomes.result(result)
        if self._active:
            super().on_step_end(result)
        else:
            self.strategy.on_step_end(result)

    def report(self) -> dict[str, Any]:
        return super().report() | {
            "decisions": self._num_decisions, "left_to_engine": self._num_left, "nodes": self._num_nodes,
            "outcomes": self._outcomes.report(), "strategy": self.strategy.report(),
        }  # fmt: skip

    @property
    def _records(self) -> bool:
        return self._record != "none" and self._engine is not None and self._engine.is_recording

    def _write(self, view: StepView, decision: ScheduleDecision, graph: IRGraph) -> None:
        if not self._records:
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
