"""Which step of the PyTorch engine comes next, and who takes part: what plug-ins decide, applied to LMDeploy's queues."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from sagellm.core.answers import check_admission, check_schedule
from sagellm.core.collectives import CommRule, unknown_backend
from sagellm.core.hooks import (
    COALESCE_S,
    Phase,
    RequestView,
    ScheduleDecision,
    StepView,
)
from sagellm.core.host import Nonsense, PluginHost
from sagellm.core.schedule_lines import ScheduleLines
from sagellm.engines.lmdeploy.chunks import Chunks
from sagellm.engines.lmdeploy.requests import service_of

# How long until requests that plug-ins hold back are looked at again: this share of the time it has been so, within bounds.
HELD_SHARE, SHORTEST_HELD_S, LONGEST_HELD_S = 10, 0.001, 0.02

NO_LIMITS: Mapping[int, int] = MappingProxyType({})

_arrival = attrgetter("arrive_time")


class StepChoice:
    """Asks the owners of `admit` and `schedule`, once for each step, about the whole queue.

    `chunks`: of prompts that are computed in several steps. `is_decoding`: what the step chosen last does.
    `comm_backends`: as `EngineHandle.comm_backends`.
    """

    def __init__(
        self, scheduler: Any, host: PluginHost, num_free_blocks: Any, hold_limit_s: float,
        comm_backends: Callable[[], Mapping[str, tuple[str, ...]]],
    ) -> None:  # fmt: skip
        self._scheduler = scheduler
        self._host = host
        self._recorder = host.recorder
        self._num_free_blocks = num_free_blocks
        self._hold_limit_s = hold_limit_s
        self._comm_backends = comm_backends
        self.chunks = Chunks(scheduler)
        self.is_decoding = False
        self._step = 0  # the last one that was sent
        self._admitted: set[int] = set()
        # seq id -> since when, without a break, it has not been admitted, or was held
        self._refused_since: dict[int, float] = {}
        self._held_since: dict[int, float] = {}
        self._left: tuple[float, list[tuple[int, bool]]] = (
            0.0,
            [],
        )  # the queue that is left to the engine, and until when
        self._decision: ScheduleDecision | None = None  # about the step that comes next
        self._unused: set[Phase] = set()  # what the decision has not been applied to yet
        self._rank: dict[int, int] = {}  # of the decision: request id -> its place
        self._held: set[int] = set()  # request ids that take no part in the step chosen last
        self._lines = ScheduleLines()
        # For the record: who was asked last, about what, with what answer, until it is written; None where nothing is kept
        self._asked: tuple[str, StepView, ScheduleDecision | None] | None = None

    @property
    def budget(self) -> int | None:
        """New tokens of the step that comes next; None for the engine's own limit."""
        return None if self._decision is None else self._decision.token_budget

    @property
    def draft_tokens(self) -> Mapping[int, int]:
        """Most guesses of the next decode step, by request; of others there is no such limit."""
        return NO_LIMITS if self._decision is None else self._decision.draft_tokens

    @property
    def rules(self) -> tuple[CommRule, ...]:
        """How the workers do collectives in the step that comes next."""
        return () if self._decision is None else tuple(self._decision.collectives)

    def sent(self) -> int:
        """A step is about to be sent. Returns its number."""
        self._step += 1
        self._unused.clear()
        if self._asked is not None:
            self._write(Phase.DECODE if self.is_decoding else Phase.PREFILL)
        return self._step

    def note_unsent(self) -> None:
        """Before anything else is told of or asked: a decision that no step came of goes on record all the same, as who made
        it may go by it in the next one."""
        if self._asked is not None:
            self._write(None)

    def ended(self, seq: Any) -> None:
        self._lines.forget((seq.session_id,))
        self._admitted.discard(seq.seq_id)
        self._refused_since.pop(seq.seq_id, None)
        self._held_since.pop(seq.seq_id, None)
        self.chunks.forget(seq)

    # ---- called by the inserted lines

    def choose_phase(self, prefill: bool) -> bool:
        """Whether the next step is one of prompts. `prefill`: what LMDeploy would do."""
        if self._host.plugins:
            own = Phase.PREFILL if prefill else Phase.DECODE
            self._ask(own)
            if self._decision is not None:
                return self._is_prefill_next(self._decision.phase or own, self._decision.hold)
        return prefill

    def order_waiting(self, waiting: list[Any]) -> list[Any]:
        """The waiting requests that may start in this step, most urgent first."""
        self.is_decoding = False
        return self._ordered(Phase.PREFILL, waiting)

    def order_running(self, running: list[Any]) -> list[Any]:
        """The running requests that decode in this step; the others keep their blocks and wait."""
        self.is_decoding = True
        self._held = set()
        order = self._ordered(Phase.DECODE, running)
        if self.budget is not None:
            order = order[: self.budget]
        if len(order) < len(running):
            self._held = {seq.session_id for seq in running}.difference([seq.session_id for seq in order])
        return order

    def over_budget(self, num_tokens: int, seq: Any, running: list[Any]) -> bool:
        """Whether `seq` must wait for the next step; the first request of a step always goes."""
        return self.budget is not None and bool(running) and num_tokens + seq.num_token_ids > self.budget

    def cut(self, seq: Any, running: list[Any]) -> None:
        """The request joins a step of prompts: with all of its tokens, or with as many as the decision lets it have."""
        if self._decision is not None and self._decision.chunk_tokens:
            limit = self._decision.chunk_tokens.get(seq.session_id)
            if limit is not None:
                self.chunks.cut(seq, limit, is_first=not running)

    def released(self, running: list[Any]) -> list[Any]:
        return [seq for seq in running if seq.session_id not in self._held] if self._held else running

    def holds_all(self) -> bool:
        """Whether nothing runs because plug-ins keep every request waiting."""
        return not self._scheduler.has_running() and self._is_holding()

    async def wait_for_plugins(self, may_run: asyncio.Event) -> bool:
        """Nothing may run now. Where plug-ins hold requests back, look again soon: LMDeploy would in a tenth of a second.

        Returns whether that was so, after a pause that grows with the time they have been holding.
        """
        if not self._is_holding():
            return False
        waited_s = time.monotonic() - max([*self._refused_since.values(), *self._held_since.values()])
        may_run.set()
        await asyncio.sleep(min(max(waited_s / HELD_SHARE, SHORTEST_HELD_S), LONGEST_HELD_S))
        may_run.clear()
        return True

    def _is_holding(self) -> bool:
        return bool(self._refused_since or self._held_since)

    # ---- decisions

    def _is_prefill_next(self, wanted: Phase, hold: frozenset[int]) -> bool:
        """Return the wanted phase if a request for it is not held; otherwise the engine would wait as if the cache were
        full."""
        scheduler = self._scheduler
        if wanted is Phase.PREFILL:
            return any(seq.session_id in self._rank and seq.session_id not in hold for seq in scheduler.waiting)
        return not scheduler.num_locked() and all(seq.session_id in hold for seq in scheduler.running)

    def _ordered(self, phase: Phase, seqs: list[Any]) -> list[Any]:
        if not self._host.plugins:
            return seqs
        if phase not in self._unused:  # the phase of this step was not chosen, or the step was not sent
            self._ask(phase)
        self._unused.discard(phase)
        decision, rank = self._decision, self._rank
        if decision is None:
            if phase is Phase.PREFILL and self._host.decides("admit"):
                seqs = [seq for seq in seqs if seq.seq_id in self._admitted]
            return seqs
        # A refused request is not in the decision, also if the plug-in that refused it has been switched off since.
        taken = [seq for seq in seqs if seq.session_id in rank and seq.session_id not in decision.hold]
        taken.sort(key=lambda seq: rank[seq.session_id])
        return taken

    def _ask(self, phase: Phase) -> None:
        """Admit who may join, then ask about all of them. `phase`: what the engine would do."""
        if self._asked is not None:
            self._write(None)
        self._decision = None
        self._unused = set(Phase)
        self.chunks.forget_refusals()
        held, self._held_since = self._held_since, {}
        admits, decides = self._host.decides("admit"), self._host.decides("schedule")
        waiting = sorted(self._scheduler.waiting, key=_arrival) if admits or decides else []
        for seq in waiting:  # who goes on with a session waits first
            service_of(seq)
        if self._refused_since:  # of those who still wait for somebody to let them in
            here = {seq.seq_id for seq in waiting} if admits else set()
            self._refused_since = {seq_id: since for seq_id, since in self._refused_since.items() if seq_id in here}
        if admits:
            waiting = self._let_in(waiting)
        if not decides:
            self._host.flush(COALESCE_S)
            return
        running = sorted(self._scheduler.running, key=_arrival)
        queue = [(seq.seq_id, True) for seq in waiting] + [(seq.seq_id, False) for seq in running]
        until_s, left = self._left
        decided = None
        if queue and not (left == queue and time.monotonic() < until_s):
            decided = self._decide(phase, waiting, running)
            if decided is not None and decided[1] is None:
                self._left = time.monotonic() + COALESCE_S, queue
        self._host.flush(COALESCE_S)
        if decided is not None and decided[1] is not None:
            self._take(decided[1], {seq.session_id: seq for seq in (*waiting, *running)}, held)

    def _decide(
        self, phase: Phase, waiting: list[Any], running: list[Any]
    ) -> tuple[str, ScheduleDecision | None] | None:
        scheduler = self._scheduler
        rows = [_row(seq, Phase.PREFILL) for seq in waiting]
        rows += [_row(seq, Phase.DECODE) for seq in running]
        view = StepView(
            step=self._step + 1, phase=phase, requests=tuple(rows), free_blocks=self._num_free_blocks(),
            token_budget=scheduler.cache_config.max_prefill_token_num,
            max_batch_size=scheduler.scheduler_config.max_batches, num_in_flight=scheduler.num_locked(),
            now_s=time.perf_counter(),
        )  # fmt: skip
        decided = self._host.decide("schedule", view, lambda answer: self._checked(answer, view))
        if decided is not None and self._recorder.enabled:
            self._asked = decided[0], view, decided[1]
        return decided

    def _checked(self, answer: Any, view: StepView) -> ScheduleDecision | None:
        decision = check_schedule(answer, view)
        if decision is not None and decision.collectives:
            if why := unknown_backend(decision.collectives, self._comm_backends()):
                raise Nonsense(f"collectives: {why}")
        return decision

    def _take(self, decision: ScheduleDecision, by_request: dict[int, Any], held: dict[int, float]) -> None:
        """Go by this decision, unless it has kept somebody waiting for too long. `held`: since when others were."""
        now = time.monotonic()
        self._held_since = {by_request[request].seq_id: 0.0 for request in decision.hold}
        for request in decision.hold:
            seq = by_request[request]
            since_s = self._held_since[seq.seq_id] = held.get(seq.seq_id, now)
            if self._overdue(seq, since_s, "schedule"):
                self._held_since = {}
                return
        self._decision = decision
        self._rank = {request: place for place, request in enumerate(decision.order or ())}

    def _let_in(self, waiting: list[Any]) -> list[Any]:
        """Those that may join: who was let in before, and who is now. All are asked about in one hand-over to the plug-in's
        thread, as one for each would make a step wait for milliseconds where a hundred are refused. All of them join where the
        plug-in is off by the end of it."""
        asked = [seq for seq in waiting if seq.seq_id not in self._admitted]
        if not asked:
            return waiting
        decided = self._host.decide_each("admit", [_row(seq, Phase.PREFILL).metadata for seq in asked], check_admission)
        if decided is None:
            self._admitted.update([seq.seq_id for seq in asked])
            return waiting
        name, answers = decided
        now = time.monotonic()
        for seq, is_admitted in zip(asked, answers, strict=True):
            if is_admitted:
                self._admitted.add(seq.seq_id)
                self._refused_since.pop(seq.seq_id, None)
            elif self._overdue(seq, self._refused_since.setdefault(seq.seq_id, now), "admit"):
                return waiting
            self._recorder.write("admit", policy=name, request=seq.session_id, admitted=is_admitted)
        return [seq for seq in waiting if seq.seq_id in self._admitted]

    def _overdue(self, seq: Any, since_s: float, hook: str) -> bool:
        return self._host.is_overdue(hook, seq.session_id, time.monotonic() - since_s, self._hold_limit_s)

    def _write(self, phase: Phase | None) -> None:
        asked, self._asked = self._asked, None
        self._recorder.write("schedule", **self._lines.fields(*asked, phase))


def _row(seq: Any, phase: Phase) -> RequestView:
    return RequestView(
        seq.session_id, phase, seq.num_valid_ids, seq.num_history_ids, seq.num_new_tokens, seq.num_blocks, seq.arrive_time,
        seq.adapter_name or "", seq.sage_service, seq.sampling_param.max_new_tokens,
        getattr(seq, "sage_first_s", math.inf), getattr(seq, "sage_last_s", math.inf),
        getattr(seq, "sage_group", None),
    )  # fmt: skip
