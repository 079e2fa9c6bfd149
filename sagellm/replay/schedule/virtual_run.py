"""A log's requests on the virtual engine, under a strategy."""

import math
from collections.abc import Callable, Sequence

from sagellm.core.hooks import Phase, RequestId, ScheduleDecision, StepResult, StepView
from sagellm.replay.schedule.base import ENGINE, RecordedRequest, RequestTimes, Run
from sagellm.replay.schedule.decisions import DecisionLine
from sagellm.scheduler_ir.outcomes import DecisionOutcomes
from sagellm.scheduler_ir.simulation.base import EngineShape, StepCosts
from sagellm.scheduler_ir.simulation.requests import VirtualRequest
from sagellm.scheduler_ir.simulation.virtual_engine import VirtualEngine
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["times_of", "virtual_run"]

Progress = Callable[[int], None]  # how many requests have ended


class _Watched(SchedulingStrategy):
    """Counts what becomes of the decisions of a strategy, which it passes on unchanged."""

    def __init__(self, strategy: SchedulingStrategy) -> None:
        self._strategy = strategy
        self.outcomes = DecisionOutcomes()

    def decide(self, view: StepView) -> ScheduleDecision | None:
        decision = self._strategy.decide(view)
        if isinstance(decision, ScheduleDecision):  # the engine refuses anything else, by name
            self.outcomes.expect(view, decision)
        return decision

    def on_step_end(self, result: StepResult) -> None:
        self.outcomes.result(result)
        self._strategy.on_step_end(result)

    def on_request_end(self, request_id: RequestId) -> None:
        self._strategy.on_request_end(request_id)


def virtual_run(
    requests: Sequence[RecordedRequest], shape: EngineShape, costs: StepCosts, strategy: SchedulingStrategy | None = None, *,
    name: str = ENGINE, gap_s: float = 0.0, speedup: float = 1.0, decisions: list[DecisionLine] | None = None,
    progress: Progress | None = None,
) -> Run:  # fmt: skip
    """Args: `strategy`: None for the engine's own choice. `speedup`: arrivals come so many times as fast. `name`: of the run.
    `decisions`: gets one for each step or round that was sent.

    Raises:
        ConfigError: a request that the engine's pool cannot hold to its end.
        StrategyFault: the strategy raises, its answer makes no sense, or it keeps a request waiting for a minute.
    """

    def keep(view: StepView, decision: ScheduleDecision | None, phase: Phase) -> None:
        decisions.append(DecisionLine(ENGINE if strategy is None else name, view, decision, phase))

    coming = [_virtual(request, speedup) for request in requests]
    watched = None if strategy is None else _Watched(strategy)
    engine = VirtualEngine(
        shape, costs, coming, watched, name=name, gap_s=gap_s, sent=None if decisions is None else keep
    )
    num_told = 0
    while engine.step():
        if progress is not None and engine.num_ended > num_told:
            num_told = engine.num_ended
            progress(num_told)
    times = sorted(map(times_of, coming), key=lambda each: (each.arrival_s, each.request_id))
    decisions_made = {} if watched is None else watched.outcomes.report()
    return Run(name, tuple(times), tuple(engine.steps), engine.num_preempted, decisions_made)


def _virtual(recorded: RecordedRequest, speedup: float) -> VirtualRequest:
    arrival_s = recorded.arrival_s / speedup
    service = recorded.service
    if math.isfinite(service.deadline_s):
        service = service._replace(deadline_s=arrival_s + service.deadline_s - recorded.arrival_s)
    return VirtualRequest(
        recorded.request_id, arrival_s, recorded.prompt_tokens, recorded.num_generated, service,
        max_new_tokens=recorded.max_new_tokens, cached_tokens=recorded.cached_tokens,
    )  # fmt: skip


def times_of(request: VirtualRequest) -> RequestTimes:
    token_s = tuple(request.token_s)
    return RequestTimes(
        request.request_id, request.arrival_s, len(token_s), token_s[0], token_s[-1], token_s, request.service
    )
