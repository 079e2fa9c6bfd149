"""A small engine without a model: a queue, a pool of blocks and a clock that steps move, for checks and comparisons."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sagellm.core.hooks import Phase, RequestId, RequestMetadata, ScheduleDecision, StepResult, StepView
from sagellm.core.scheduling import NO_SERVICE, ServiceLevel
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy

__all__ = ["Job", "StepCosts", "VirtualQueue"]

IDLE_S = 0.01  # that a step takes in which nothing can run
REFUSED = "only the first request of a step can be cut"


@dataclass(slots=True)
class Job:
    """A request and what became of it. Lengths in tokens, times in seconds; `output` tokens end it, which nobody knows before.

    Attributes:
        token_s: when each of its tokens was there.
        end_s: when it was complete; infinity before, and where it was cancelled.
    """

    request_id: RequestId
    arrival_s: float
    prompt: int
    output: int
    service: ServiceLevel = NO_SERVICE
    adapter: str = ""
    max_new_tokens: int = 0
    computed: int = 0
    blocks: int = 0
    phase: Phase = Phase.PREFILL
    token_s: list[float] = field(default_factory=list)
    end_s: float = math.inf
    is_cancelled: bool = False

    @property
    def num_tokens(self) -> int:
        return self.prompt + len(self.token_s)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrival_s if self.token_s else math.inf

    @property
    def gaps_s(self) -> list[float]:
        """Between each token and the next."""
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]

    def view(self) -> RequestMetadata:
        first_s, last_s = (self.token_s[0], self.token_s[-1]) if self.token_s else (math.inf, math.inf)
        return RequestMetadata(
            self.request_id, self.phase, self.num_tokens, self.computed, len(self.token_s), self.blocks, self.arrival_s,
            self.adapter, self.service, self.max_new_tokens or self.output, first_s, last_s,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds: a constant of each step, and of each token, request and pair of tokens."""

    prefill_s: float = 0.005
    prompt_token_s: float = 1e-4
    pair_s: float = 1e-9
    decode_s: float = 0.01
    request_s: float = 2e-4

    def prefill(self, parts: Sequence[tuple[int, int]]) -> float:
        """Of new tokens and those before them, of each request."""
        work = sum(new * self.prompt_token_s + new * (before + new / 2) * self.pair_s for new, before in parts)
        return self.prefill_s + work

    def decode(self, batch: int) -> float:
        return self.decode_s + batch * self.request_s


class VirtualQueue:
    """Plays jobs on a strategy as LMDeploy's PyTorch engine would: a step is one of prompts or one of decodes; prompts are
    taken until budget, batch or blocks are full, the first always; where a decode step lacks a block the last request of the
    order goes back to wait and loses its blocks.

    Args:
        strategy: None: the engine's own order and phase.
        hide: called with those that run; it says who is on the device still and so in no view.
    """

    def __init__(
        self, strategy: SchedulingStrategy | None, jobs: Sequence[Job], *, block_size: int = 16, num_blocks: int = 4096,
        token_budget: int = 2048, max_batch_size: int = 32, costs: StepCosts | None = None,
        hide: Callable[[list[Job]], set[RequestId]] | None = None,
    ) -> None:  # fmt: skip
        self.jobs = {job.request_id: job for job in jobs}
        self.now_s = 0.0
        self.num_steps = self.num_preempted = self.num_idle = 0
        self.phases: list[Phase] = []
        self._coming = sorted(jobs, key=lambda job: job.arrival_s)
        self._queue: list[Job] = []
        self._strategy = strategy
        self._block_size, self._free = block_size, num_blocks
        self._token_budget, self._max_batch_size = token_budget, max_batch_size
        self._costs = costs or StepCosts()
        self._hide = hide

    @property
    def unfinished(self) -> list[Job]:
        return [*self._queue, *self._coming]

    def run(self, max_steps: int = 100_000, until_s: float = math.inf) -> bool:
        """Whether all jobs came to their end in so many steps and so much time."""
        while self.unfinished and self.num_steps < max_steps and self.now_s < until_s:
            self.step()
        return not self.unfinished

    def cancel(self, request_id: RequestId) -> None:
        """A request that has come vanishes; one that has not, or has ended, stays as it is."""
        job = self.jobs[request_id]
        if job in self._queue:
            job.is_cancelled = True
            self._leave(job)

    def step(self) -> None:
        if not self._queue and self._coming:
            self.now_s = max(self.now_s, self._coming[0].arrival_s)
        while self._coming and self._coming[0].arrival_s <= self.now_s:
            self._queue.append(self._coming.pop(0))
        view = self._view()
        decision = self._strategy.decide(view) if self._strategy is not None else None
        self._carry_out(decision or ScheduleDecision(), view)
        self.num_steps += 1

    def _view(self) -> StepView:
        self._queue.sort(key=lambda job: (job.phase is Phase.DECODE, job.arrival_s))
        running = [job for job in self._queue if job.phase is Phase.DECODE]
        hidden = self._hide(running) if self._hide is not None else set()
        seen = [job for job in self._queue if job.request_id not in hidden]
        num_waiting, num_running = len(self._queue) - len(running), len(running) - len(hidden)
        phase = Phase.DECODE
        if num_waiting and (num_waiting >= 4 or num_running < self._max_batch_size / 2):
            phase = Phase.PREFILL
        return StepView(
            self.num_steps, phase, tuple([job.view() for job in seen]), self._free, self._token_budget,
            self._max_batch_size, len(hidden), self.now_s,
        )  # fmt: skip

    def _carry_out(self, decision: ScheduleDecision, view: StepView) -> None:
        order = [request.request_id for request in view.requests] if decision.order is None else decision.order
        jobs = [self.jobs[name] for name in order if name not in decision.hold]
        waiting = [job for job in jobs if job.phase is Phase.PREFILL]
        running = [job for job in jobs if job.phase is Phase.DECODE]
        phase = decision.phase or view.phase
        if phase is Phase.PREFILL:
            num_running = sum(job.phase is Phase.DECODE for job in self._queue)
            if taken := self._take(waiting, decision, self._max_batch_size - num_running):
                self._prefill(taken, decision)
                return
        if running := self._keep(running):
            self._decode(running)
            return
        if not any(job.phase is Phase.DECODE for job in self._queue):  # nobody to decode: prompts, if there are any
            if taken := self._take(waiting, decision, self._max_batch_size):
                self._prefill(taken, decision)
                return
        self.now_s += IDLE_S
        self.num_idle += 1

    def _take(self, waiting: list[Job], decision: ScheduleDecision, room: int) -> list[tuple[Job, int]]:
        """Who computes prompt tokens in this step, and how many."""
        budget = min(decision.token_budget or self._token_budget, self._token_budget)
        taken: list[tuple[Job, int]] = []
        for place, job in enumerate(waiting[: max(room, 0)]):
            tokens = job.num_tokens - job.computed
            if not taken:
                tokens = min(tokens, decision.chunk_tokens.get(job.request_id, tokens))
            elif tokens > budget:
                break
            if not self._find_room(job, waiting[place + 1 :]):
                break
            taken.append((job, tokens))
            budget -= tokens
        return taken

    def _find_room(self, job: Job, later: list[Job]) -> bool:
        """Blocks for all tokens of a job, at the cost of what later ones have computed of their prompts."""
        need = -(-job.num_tokens // self._block_size) - job.blocks
        for other in reversed(later):
            if need <= self._free:
                break
            self._lose(other)
        if need > self._free:
            return False
        self._free, job.blocks = self._free - need, job.blocks + need
        return True

    def _keep(self, running: list[Job]) -> list[Job]:
        """Those that can decode: each has a block for its next token, the last ones of the order give up theirs."""
        running = list(running)
        kept: list[Job] = []
        while running:
            job = running.pop(0)
            need = -(-job.num_tokens // self._block_size) - job.blocks
            while need > self._free and running:
                self._preempt(running.pop())
            if need > self._free:
                self._preempt(job)
                continue
            self._free, job.blocks = self._free - need, job.blocks + max(need, 0)
            kept.append(job)
        return kept

    def _prefill(self, taken: list[tuple[Job, int]], decision: ScheduleDecision) -> None:
        parts = [(tokens, job.computed) for job, tokens in taken]
        for job, tokens in taken:
            job.computed += tokens
        names = {job.request_id for job, _ in taken[1:]}
        refused = tuple((name, REFUSED) for name in decision.chunk_tokens if name in names)
        self._end_step(Phase.PREFILL, taken, self._costs.prefill(parts), sum(before for _, before in parts), refused)

    def _decode(self, running: list[Job]) -> None:
        context = sum(job.computed for job in running)
        for job in running:
            job.computed = job.num_tokens
        self._end_step(Phase.DECODE, [(job, 1) for job in running], self._costs.decode(len(running)), context)

    def _end_step(
        self, phase: Phase, done: list[tuple[Job, int]], seconds: float, context: int,
        refused: tuple[tuple[RequestId, str], ...] = (),
    ) -> None:  # fmt: skip
        self.now_s += seconds
        self.phases.append(phase)
        for job, _ in done:
            if job.computed == job.num_tokens:
                job.phase = Phase.DECODE
                job.token_s.append(self.now_s)
        computed = tuple([(job.request_id, tokens) for job, tokens in done])
        if self._strategy is not None:
            self._strategy.on_step_end(StepResult(
                self.num_steps, phase, len(done), sum(tokens for _, tokens in done), self.now_s, seconds, context,
                computed=computed, refused=refused,
            ))  # fmt: skip
        for job, _ in done:
            if len(job.token_s) >= job.output:
                job.end_s = self.now_s
                self._leave(job)

    def _preempt(self, job: Job) -> None:
        self.num_preempted += 1
        job.phase = Phase.PREFILL
        self._lose(job)

    def _lose(self, job: Job) -> None:
        self._free += job.blocks
        job.blocks = job.computed = 0

    def _leave(self, job: Job) -> None:
        self._lose(job)
        self._queue.remove(job)
        if self._strategy is not None:
            self._strategy.on_request_end(job.request_id)
