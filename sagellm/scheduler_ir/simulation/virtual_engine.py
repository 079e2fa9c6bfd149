"""LMDeploy's engine on a virtual clock: its loop, with a strategy in the scheduler's place or with its own choice.

While a step is on the device the next one is chosen already where LMDeploy does so; those in flight are in no view then. A
round of decode steps is chosen and sent as one. Nothing here reads a clock: the same requests give the same run.

Source: LMDeploy 0.11.0, pytorch/engine/engine.py, `_async_loop_main` and `InputsMakerAsync`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sagellm.core.answers import check_schedule
from sagellm.core.errors import ConfigError
from sagellm.core.hooks import Phase, RequestId, ScheduleDecision, StepResult, StepView
from sagellm.core.host import Nonsense
from sagellm.core.step_times import num_pairs
from sagellm.scheduler_ir.simulation.base import EngineShape, FaultKind, StepCosts, StepRun, StrategyFault
from sagellm.scheduler_ir.simulation.queues import Queues
from sagellm.scheduler_ir.simulation.requests import VirtualRequest
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["Sent", "VirtualEngine"]

# While strategies hold everybody, the engine looks again after this share of the time that it has been so, within bounds.
HELD_SHARE, SHORTEST_HELD_S, LONGEST_HELD_S = 10, 0.001, 0.02
FULL_S = 0.1  # LMDeploy's pause if no request is held and yet none can run, as the one that may had to give up its blocks
HOLD_LIMIT_S = 60.0  # as in the engine, where a request that is held for longer counts as a fault of the strategy

# View and decision of a step or round (None: the engine's own choice), and the phase that was sent.
Sent = Callable[[StepView, ScheduleDecision | None, Phase], None]


@dataclass(slots=True)
class _Step:
    """A step, or a round of decode steps, on its way to the device.

    Attributes:
        batch: (request, new tokens, tokens computed before) as it was sent.
    """

    number: int
    is_prefill: bool
    batch: list[tuple[VirtualRequest, int, int]]
    refused: tuple[tuple[RequestId, str], ...]
    start_s: float | None  # None where it follows the step before it without a gap


class VirtualEngine:
    """One run of these requests.

    Args:
        strategy: None for the engine's own choice.
        name: of the strategy, in messages.
        gap_s: from the end of a step to the beginning of one that was chosen after it.
        sent: told of each step or round that is sent.

    Raises ConfigError: a request that no engine would take, or that this one's pool cannot hold to its end. LMDeploy drops
    such a request in the middle of its answer, without a word to its client.
    """

    def __init__(
        self, shape: EngineShape, costs: StepCosts, requests: Sequence[VirtualRequest],
        strategy: SchedulingStrategy | None = None, *, name: str = "", gap_s: float = 0.0, sent: Sent | None = None,
    ) -> None:  # fmt: skip
        _check(requests, shape)
        self.requests = {each.request_id: each for each in requests}
        self.now_s = 0.0
        self.steps: list[StepRun] = []
        self.num_ended = 0  # requests that are complete
        self.num_pauses = 0  # in which nothing could run
        self._shape, self._costs, self._strategy, self._gap_s, self._sent = shape, costs, strategy, gap_s, sent
        self._name = name or (strategy.name if strategy is not None else "")
        self._queues = Queues(shape)
        self._num_sent = 0
        # The next one last.
        self._coming = sorted(requests, key=lambda each: (each.arrival_s, each.request_id), reverse=True)
        self._ahead: _Step | None = None  # sent while the one before it was on the device
        self._decision: ScheduleDecision | None = None  # about the step that comes next
        self._view: StepView | None = None
        self._held_since: dict[RequestId, float] = {}

    @property
    def num_preempted(self) -> int:
        return self._queues.num_preempted

    @property
    def in_flight(self) -> list[VirtualRequest]:
        """Those whose next step has been sent already, in its order; they are in no view."""
        return list(self._queues.in_flight)

    @property
    def unfinished(self) -> list[VirtualRequest]:
        """Those that are neither complete nor cancelled, by arrival; also those that are to come."""
        queues = self._queues
        return queues.by_arrival([*queues.waiting, *queues.running, *queues.in_flight, *self._coming])

    def run(self, max_steps: int | None = None, until_s: float = math.inf) -> bool:
        """Whether all requests came to their end in so many calls of `step`, and in steps that began before `until_s`.
        Raises StrategyFault."""
        num_left = math.inf if max_steps is None else max_steps
        while num_left > 0 and self.now_s < until_s and self.step():
            num_left -= 1
        return not self.unfinished

    def add(self, request: VirtualRequest) -> None:
        """Let a request come that was not known at the start. Steps that begin after its arrival must not have run yet.

        Raises ConfigError: as at the start, or its id is taken.
        """
        _check([request], self._shape)
        if request.request_id in self.requests:
            raise ConfigError(f"request {request.request_id} is there already; give each request an id of its own.")
        self.requests[request.request_id] = request
        self._coming.append(request)
        self._coming.sort(key=lambda each: (each.arrival_s, each.request_id), reverse=True)

    def step(self) -> bool:
        """A step, or a round of decode steps, comes to its end; or a pause goes by. Return False if no request is left.

        Raises StrategyFault: it raised, answered what makes no sense, or keeps a request waiting for a minute.
        """
        if self._ahead is None:
            if not (self._queues.waiting or self._queues.running):
                if not self._coming:
                    return False
                self.now_s = max(self.now_s, self._coming[-1].arrival_s)
            self._arrive()
            self._ahead = self._choose(is_ahead=False)
        if self._ahead is None:
            self._pause()
        else:
            self._ahead = self._on_device(self._ahead)
        return True

    def cancel(self, request_id: RequestId) -> None:
        """One that has come leaves at once with its blocks; a step that it is in goes on, and its result names it. One that
        has not come, or has left, stays as it is."""
        request = self.requests[request_id]
        if request.has_ended or request in self._coming:
            return
        request.is_cancelled = True
        self._queues.leave(request)
        self._told("on_request_end", request_id)

    def _arrive(self) -> None:
        while self._coming and self._coming[-1].arrival_s <= self.now_s:
            self._queues.waiting.append(self._coming.pop())

    # ---- choosing

    def _choose(self, is_ahead: bool, is_decoding: bool = False) -> _Step | None:
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
        if self._sent is not None:
            self._sent(self._view, self._decision, Phase.PREFILL if is_prefill else Phase.DECODE)
        queues.send(taken)
        batch = [(request, request.chunk or request.num_left, request.num_computed) for request in taken]
        return _Step(self._num_sent, is_prefill, batch, tuple(queues.refused), None if is_ahead else self.now_s + self._gap_s)

    def _phase(self, is_prefill: bool) -> bool:
        """Asks the strategy about the whole queue; returns whether prompts come next. `is_prefill`: the engine's choice."""
        self._decision = self._view = None
        if self._strategy is None and self._sent is None:
            return is_prefill  # the rows would not be read
        queues = self._queues
        waiting = queues.by_arrival(queues.waiting)
        running = queues.by_arrival(queues.running)
        rows = [request.metadata(Phase.PREFILL) for request in waiting]
        rows += [request.metadata(Phase.DECODE) for request in running]
        self._view = StepView(
            step=self._num_sent + 1, phase=Phase.PREFILL if is_prefill else Phase.DECODE, requests=tuple(rows),
            free_blocks=queues.pool.num_free, token_budget=self._shape.max_prefill_tokens,
            max_batch_size=self._shape.max_batch_size, num_in_flight=len(queues.in_flight), now_s=self.now_s,
        )  # fmt: skip
        held, self._held_since = self._held_since, {}
        if self._strategy is None or not rows:
            return is_prefill
        self._decision = decision = self._checked(self._told("decide", self._view), self._view)
        if decision is None:
            return is_prefill
        for request in sorted(decision.hold):
            self._held_since[request] = held.get(request, self.now_s)
            self._blame(request, self._held_since[request])
        may_prefill = any(request.request_id not in decision.hold for request in waiting)
        if decision.phase is Phase.PREFILL:
            return may_prefill
        if decision.phase is Phase.DECODE:
            return not queues.in_flight and all(request.request_id in decision.hold for request in running)
        return is_prefill

    def _told(self, method: str, *arguments: Any) -> Any:
        """The strategy's answer; None without one."""
        if self._strategy is None:
            return None
        try:
            return getattr(self._strategy, method)(*arguments)
        except Exception as error:
            raise self._fault(
                FaultKind.RAISED, f"{method} raised {type(error).__name__}: {error} at {self.now_s:.3f} s."
            ) from error

    def _checked(self, answer: ScheduleDecision | None, view: StepView) -> ScheduleDecision | None:
        try:
            return check_schedule(answer, view)
        except (Nonsense, TypeError, ValueError) as error:
            raise self._fault(FaultKind.ANSWER, f"step {view.step}: {error}.") from None

    def _blame(self, request: RequestId, since_s: float) -> None:
        if self.now_s - since_s > HOLD_LIMIT_S:
            message = f"request {request} has been held for {HOLD_LIMIT_S:.0f} s; let it go on."
            raise self._fault(FaultKind.HELD, message, request)

    def _fault(self, kind: FaultKind, message: str, request: RequestId | None = None) -> StrategyFault:
        return StrategyFault(kind, f"strategy {self._name}: {message}", self._num_sent + 1, self.now_s, request)

    def _pause(self) -> None:
        """Nothing may run now. The engine looks again after a while, which grows with the time that strategies hold."""
        self.num_pauses += 1
        pause_s = FULL_S
        if self._held_since:
            pause_s = (self.now_s - max(self._held_since.values())) / HELD_SHARE
            pause_s = min(max(pause_s, SHORTEST_HELD_S), LONGEST_HELD_S)
        self.now_s += pause_s

    # ---- running

    def _on_device(self, sent: _Step) -> _Step | None:
        """The step runs, and when its last decode step begins the next one may be chosen: that one is returned."""
        if sent.start_s is not None:
            self.now_s = sent.start_s
        ahead = None
        num_loops = 1 if sent.is_prefill else self._shape.decode_round
        for loop in range(num_loops):
            if loop == num_loops - 1:
                self._arrive()
                ahead = self._choose(is_ahead=True, is_decoding=not sent.is_prefill)
            self._one_step(sent, loop)
        self._queues.back([request for request, _, _ in sent.batch])
        return ahead

    def _one_step(self, sent: _Step, loop: int) -> None:
        batch = sent.batch
        phase = Phase.PREFILL if sent.is_prefill else Phase.DECODE
        num_before = sum(before for _, _, before in batch) + loop * len(batch)
        attention = sum([num_pairs(new, before) for _, new, before in batch]) if sent.is_prefill else float(num_before)
        computed = tuple((request.request_id, new) for request, new, _ in batch)
        num_tokens = sum(new for _, new in computed)
        seconds = self._costs.seconds(phase, len(batch), num_tokens, attention, self.now_s)
        self.now_s += seconds
        self.steps.append(StepRun(sent.number, phase, self.now_s, seconds, len(batch), num_tokens, attention, computed))
        ended = [request for request, new, _ in batch if self._progress(request, new)]
        if self._strategy is None:
            return
        result = StepResult(
            sent.number, phase, len(batch), num_tokens, self.now_s, seconds, num_before, computed=computed,
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
        request.token_s.append(self.now_s)
        if request.has_ended:
            self.num_ended += 1
            self._queues.leave(request)
        return request.has_ended


def _check(requests: Sequence[VirtualRequest], shape: EngineShape) -> None:
    seen: set[RequestId] = set()
    for each in requests:
        who = f"request {each.request_id}"
        if each.request_id in seen:
            raise ConfigError(f"{who} is there twice; give each request an id of its own.")
        seen.add(each.request_id)
        if each.num_computed or each.token_s or each.is_cancelled:
            raise ConfigError(f"{who} is of another run; make a new one for each run.")
        if each.prompt_tokens < 1 or each.num_to_generate < 1:
            raise ConfigError(
                f"{who} has {each.prompt_tokens} tokens of prompt, {each.num_to_generate} to generate; give at least 1 of each."
            )
        # A round begins with a block for each of its decode steps, also behind the last token. It begins where the round
        # before it ended, which is anywhere once a request was preempted.
        behind = shape.decode_round if each.num_to_generate > 1 else 0
        needed = shape.blocks_of(each.prompt_tokens + each.num_to_generate - 1 + behind)
        if needed > shape.num_blocks:
            raise ConfigError(
                f"{who} needs up to {needed} blocks of {shape.block_size} tokens, for {each.prompt_tokens} tokens of prompt, "
                f"{each.num_to_generate} of answer and a round of {shape.decode_round} decode steps at its end; the engine has "
                f"{shape.num_blocks}, and would drop it. Give more blocks, shorter rounds or a shorter request."
            )
