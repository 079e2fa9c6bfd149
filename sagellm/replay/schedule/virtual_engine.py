"""LMDeploy's engine on a virtual clock: its loop, with a strategy in the scheduler's place or with its own choice.

While a step is on the device the next one is chosen already where LMDeploy does so; those in flight are in no view then. A
round of decode steps is chosen and sent as one. Nothing here reads a clock: the same requests give the same run.

Source: LMDeploy 0.11.0, pytorch/engine/engine.py, `_async_loop_main` and `InputsMakerAsync`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sagellm.core.answers import check_schedule
from sagellm.core.errors import PlanError
from sagellm.core.hooks import Phase, RequestId, ScheduleDecision, StepResult, StepView
from sagellm.core.host import Nonsense
from sagellm.replay.schedule.base import ENGINE, EngineShape, RecordedRequest, Run, StepRun
from sagellm.replay.schedule.decisions import DecisionLine
from sagellm.replay.schedule.queues import Queues
from sagellm.replay.schedule.requests import VirtualRequest
from sagellm.replay.schedule.step_times import StepTimes
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["VirtualEngine"]

# While nothing may run, the engine looks again after this share of the time that it has been so, within bounds.
HELD_SHARE, SHORTEST_HELD_S, LONGEST_HELD_S = 10, 0.001, 0.02
HOLD_LIMIT_S = 60.0  # as in the engine, where a request that is held for longer counts as a fault of the strategy

Progress = Callable[[int], None]  # how many requests have ended


@dataclass(slots=True)
class _Sent:
    """A step, or a round of decode steps, on its way to the device."""

    step: int
    is_prefill: bool
    taken: list[VirtualRequest]
    refused: tuple[tuple[RequestId, str], ...]
    start_s: float | None  # None where it follows the step before it without a gap


class VirtualEngine:
    """One run. Args: `strategy`: None for the engine's own choice. `speedup`: arrivals come so many times as fast.
    `gap_s`: from the end of a step to the beginning of one that was chosen after it. `name`: of the run. `keep_decisions`: in
    `decisions`, one for each step or round that was sent.
    """

    def __init__(
        self, shape: EngineShape, times: StepTimes, strategy: SchedulingStrategy | None = None, *, name: str = ENGINE,
        gap_s: float = 0.0, speedup: float = 1.0, keep_decisions: bool = False,
    ) -> None:  # fmt: skip
        self._shape, self._times, self._strategy, self._name = shape, times, strategy, name
        self._gap_s, self._speedup, self._keep_decisions = gap_s, speedup, keep_decisions
        self._queues = Queues(shape)
        self._now_s = 0.0
        self._num_sent = self._num_ended = 0
        self._steps: list[StepRun] = []
        self._coming: list[VirtualRequest] = []  # the next one last
        self._decision: ScheduleDecision | None = None  # about the step that comes next
        self._view: StepView | None = None
        self._held_since: dict[RequestId, float] = {}
        self.decisions: list[DecisionLine] = []

    def run(self, requests: Sequence[RecordedRequest], progress: Progress | None = None) -> Run:
        """Raises PlanError: the strategy's answer makes no sense, or it keeps a request waiting for a minute."""
        every = [VirtualRequest.of(request, self._speedup) for request in requests]
        self._coming = sorted(every, key=lambda each: (each.arrival_s, each.request_id), reverse=True)
        num_told, ahead = 0, None
        queues = self._queues
        while True:
            if ahead is None:
                if not (queues.waiting or queues.running):
                    if not self._coming:
                        break
                    self._now_s = max(self._now_s, self._coming[-1].arrival_s)
                self._arrive()
                ahead = self._choose(is_ahead=False)
                if ahead is None:
                    self._wait()
                    continue
            ahead = self._on_device(ahead)
            if progress is not None and self._num_ended > num_told:
                num_told = self._num_ended
                progress(num_told)
        times = sorted((each.times() for each in every), key=lambda each: (each.arrival_s, each.request_id))
        return Run(self._name, tuple(times), tuple(self._steps), queues.num_preempted)

    def _arrive(self) -> None:
        while self._coming and self._coming[-1].arrival_s <= self._now_s:
            self._queues.waiting.append(self._coming.pop())

    # ---- choosing

    def _choose(self, is_ahead: bool, is_decoding: bool = False) -> _Sent | None:
        """The next step. `is_ahead`: one is on the device, which decodes or not."""
        queues = self._queues
        own = queues.wants_prefill()
        # By its own choice the engine looks ahead or not, and only then asks the strategy.
        if is_ahead and not queues.may_send_ahead(own, is_decoding):
            return None
        is_prefill = self._phase(own)
        taken = queues.take_prefill(self._decision) if is_prefill else []
        if is_prefill and not taken and not is_ahead:
            is_prefill = False
        if not taken and not is_prefill and queues.running:
            taken = queues.take_decode(self._decision)
        if not taken:
            return None
        self._num_sent += 1
        if self._keep_decisions:
            phase = Phase.PREFILL if is_prefill else Phase.DECODE
            by = ENGINE if self._strategy is None else self._name
            self.decisions.append(DecisionLine(by, self._view, self._decision, phase))
        queues.send(taken)
        return _Sent(self._num_sent, is_prefill, taken, tuple(queues.refused), None if is_ahead else self._now_s + self._gap_s)

    def _phase(self, is_prefill: bool) -> bool:
        """Asks the strategy about the whole queue; returns whether prompts come next. `is_prefill`: the engine's choice."""
        self._decision = self._view = None
        if self._strategy is None and not self._keep_decisions:
            return is_prefill  # nobody would read the rows
        queues = self._queues
        waiting = queues.by_arrival(queues.waiting)
        running = queues.by_arrival(queues.running)
        rows = [request.metadata(Phase.PREFILL) for request in waiting]
        rows += [request.metadata(Phase.DECODE) for request in running]
        self._view = StepView(
            self._num_sent + 1, Phase.PREFILL if is_prefill else Phase.DECODE, tuple(rows), queues.pool.num_free,
            self._shape.max_prefill_tokens, self._shape.max_batch_size, len(queues.in_flight), self._now_s,
        )  # fmt: skip
        held, self._held_since = self._held_since, {}
        if self._strategy is None or not rows:
            return is_prefill
        self._decision = decision = self._checked(self._told("decide", self._view), self._view)
        if decision is None:
            return is_prefill
        for request in sorted(decision.hold):
            self._held_since[request] = held.get(request, self._now_s)
            self._blame(request, self._held_since[request])
        may_prefill = any(request.request_id not in decision.hold for request in waiting)
        if decision.phase is Phase.PREFILL:
            return may_prefill
        if decision.phase is Phase.DECODE:
            return not queues.in_flight and all(request.request_id in decision.hold for request in running)
        return is_prefill

    def _told(self, method: str, *arguments: Any) -> Any:
        """The strategy's answer. An engine would go on without a strategy that raises; here its figures would be another's."""
        try:
            return getattr(self._strategy, method)(*arguments)
        except Exception as error:
            raise PlanError(
                f"strategy {self._name}: {method} raised {type(error).__name__}: {error} at {self._now_s:.3f} s."
            ) from error

    def _checked(self, answer: ScheduleDecision | None, view: StepView) -> ScheduleDecision | None:
        try:
            checked = check_schedule(answer, view)
        except (Nonsense, TypeError, ValueError) as error:
            raise PlanError(f"strategy {self._name}, step {view.step}: {error}.") from None
        if checked is None:
            return None
        chunks = {request: int(tokens) for request, tokens in answer.chunk_tokens.items()}
        known = {row.request_id for row in view.requests}
        if set(chunks) - known or any(tokens < 1 for tokens in chunks.values()):
            raise PlanError(
                f"strategy {self._name}, step {view.step}: chunk_tokens {chunks}; give at least 1 token, for requests among "
                f"{sorted(known)}."
            )
        reasons = {request: str(why) for request, why in answer.reasons.items()}
        return replace(checked, phase=answer.phase, chunk_tokens=chunks, reasons=reasons)

    def _blame(self, request: RequestId, since_s: float) -> None:
        if self._now_s - since_s > HOLD_LIMIT_S:
            raise PlanError(
                f"strategy {self._name}: request {request} has been held for {HOLD_LIMIT_S:.0f} s; let it "
                "go on."
            )

    def _wait(self) -> None:
        """Nothing may run now. The engine looks again after a while, which grows with the time that it has been so."""
        since = list(self._held_since.values())
        if not since:
            raise PlanError(f"strategy {self._name}: nothing may run though nobody is held; it must let the first request run.")
        pause_s = (self._now_s - max(since)) / HELD_SHARE
        self._now_s += min(max(pause_s, SHORTEST_HELD_S), LONGEST_HELD_S)

    # ---- running

    def _on_device(self, sent: _Sent) -> _Sent | None:
        """The step runs, and when its last decode step begins the next one may be chosen: that one is returned."""
        if sent.start_s is not None:
            self._now_s = sent.start_s
        ahead = None
        num_loops = 1 if sent.is_prefill else self._shape.decode_round
        batch = [(request, request.chunk or request.num_left, request.num_computed) for request in sent.taken]
        for loop in range(num_loops):
            if loop == num_loops - 1:
                self._arrive()
                ahead = self._choose(is_ahead=True, is_decoding=not sent.is_prefill)
            self._one_step(sent, batch, loop)
        self._queues.back(sent.taken)
        return ahead

    def _one_step(self, sent: _Sent, batch: list[tuple[VirtualRequest, int, int]], loop: int) -> None:
        """`batch`: (request, new tokens, tokens computed before) when it was sent."""
        phase = Phase.PREFILL if sent.is_prefill else Phase.DECODE
        num_before = sum(before for _, _, before in batch) + loop * len(batch)
        attention = sum(new * (before + new / 2) for _, new, before in batch) if sent.is_prefill else float(num_before)
        computed = tuple((request.request_id, new) for request, new, _ in batch)
        num_tokens = sum(new for _, new in computed)
        seconds = self._times.seconds(phase, len(batch), num_tokens, attention)
        self._now_s += seconds
        self._steps.append(StepRun(sent.step, phase, self._now_s, seconds, len(batch), num_tokens, attention, computed))
        ended = [request for request, new, _ in batch if self._progress(request, new)]
        if self._strategy is None:
            return
        result = StepResult(
            sent.step, phase, len(batch), num_tokens, self._now_s, seconds, num_before, computed=computed,
            refused=sent.refused if loop == 0 else (),
        )  # fmt: skip
        self._told("on_step_end", result)
        for request in ended:
            self._told("on_request_end", request.request_id)

    def _progress(self, request: VirtualRequest, new: int) -> bool:
        """Its tokens of this step are computed. Returns whether it ends with that. A round goes on for who has ended."""
        if request.has_ended:
            return False
        request.num_computed += new
        if request.chunk is not None:
            return False
        request.num_tokens += 1
        request.num_generated += 1
        request.token_s.append(self._now_s)
        if request.has_ended:
            self._num_ended += 1
            self._queues.finish(request)
        return request.has_ended
