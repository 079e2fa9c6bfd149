"""Pooling at the level of tokens: the models or instances that share an engine decode in turns, each with a quota."""

import math
from dataclasses import dataclass

from sagellm.core.hooks import Phase, RequestId, RequestView, ScheduleDecision, StepResult, StepView
from sagellm.core.step_times import StepTimes
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.options import check_count, check_number

__all__ = ["Aegaeon", "quotas"]

MIN_TOKENS = 8  # of a turn: where switching costs nothing there would be no reason for any length
RECENT_TURNS = 8  # over which the mean of the prompts' seconds looks back, about
MAX_ROUND_S = 30.0  # held for longer than a minute, a request counts as starved


def quotas(token_s: list[float], tpot_s: list[float], switch_s: float, max_turn_s: float) -> list[float]:
    """Seconds of each batch's turn in a round.

    n = `tpot_s` / `token_s` is the number of tokens made in the time in which one is owed, s the sum of 1 / n over the batches,
    c the seconds of all switches. A turn of c / (n * (a - s)) seconds gives each batch the same share 1 / a of its due. The
    least a that keeps turns within `max_turn_s` is taken, and at least 1/2: twice as fast as owed is enough.

    Source: Aegaeon (Xiang et al., SOSP 2025), weighted round robin of decoding batches.

    Args:
        token_s, tpot_s: of each batch, seconds of a decode step and seconds owed for a token.
        switch_s: all switches of a round together; where they cost nothing no turn needs a length.
    """
    if switch_s == 0:  # then nothing speaks for a longer turn
        return [0.0] * len(token_s)
    per_token = [owed / taken for owed, taken in zip(tpot_s, token_s, strict=True)]
    load = sum(1 / each for each in per_token)
    attained = max(switch_s / (min(per_token) * max_turn_s) + load, 0.5)
    return [switch_s / (each * (attained - load)) for each in per_token]


@dataclass(slots=True)
class _Turn:
    """`left_tokens`: decode steps until it ends, of those that are done; `members`: who decodes in it and has not ended."""

    adapter: str
    members: frozenset[RequestId]
    left_tokens: int


class Aegaeon(SchedulingStrategy):
    """Groups requests by `adapter`, the key of a model or instance. Between two turns at most `group_size` prompts are
    computed, of the group whose oldest request has waited longest. Then a batch of one group decodes for its turn, while all
    others are held. A turn ends with its quota (`quotas`), or when none of its requests is left.

    With one model no switch costs anything and no group is held for another: up to `batch_size` requests simply decode, more
    than that in turns, round robin.

    Args:
        default_tpot_s: of requests that ask for none.
        switch_s: what it costs to go over to another model.
        batch_size: requests that decode together at most; from 1.
        group_size: prompts of one group before the next turn; from 1.
        max_turn_s: the longest turn.
    """

    name = "aegaeon"

    def __init__(
        self,
        *,
        default_tpot_s: float = 0.1,
        switch_s: float = 0.05,
        batch_size: int = 32,
        group_size: int = 8,
        max_turn_s: float = 2.0,
    ) -> None:
        self.times = StepTimes()
        self._tpot_s = check_number(self.name, "default_tpot_s", default_tpot_s, 1e-4)
        self._switch_s = check_number(self.name, "switch_s", switch_s, 0)
        self._batch_size = check_count(self.name, "batch_size", batch_size, 1)
        self._group_size = check_count(self.name, "group_size", group_size, 1)
        self._max_turn_s = check_number(self.name, "max_turn_s", max_turn_s, 1e-3, MAX_ROUND_S)
        self._turn: _Turn | None = None
        self._rounds: list[RequestId] = []  # who decoded, the latest last: the others are due
        self._num_turns = 0
        self._has_filled = False  # prompts were computed since the last turn
        self._filled_s = 0.0  # by prompts since the last turn
        self._fill_s = 0.0  # the mean of that

    def decide(self, view: StepView) -> ScheduleDecision:
        waiting, running = view.waiting, view.running
        turn = self._turn
        if turn is not None and turn.left_tokens > 0 and turn.members:
            members = [request for request in running if request.request_id in turn.members]
            if members or view.num_in_flight:  # they may be on the device: until they are back no other begins
                return self._decode(view, turn, members)
        if waiting and not (self._has_filled and running):
            self._turn, self._has_filled = None, True
            return self._prefill(view, waiting)
        if not running:
            return ScheduleDecision(reason="no request decodes")
        self._has_filled = False
        self._turn = turn = self._next_turn(running)
        return self._decode(view, turn, [request for request in running if request.request_id in turn.members])

    def on_step_end(self, result: StepResult) -> None:
        self.times.observe(result)
        turn = self._turn
        if result.phase is Phase.PREFILL:
            self._filled_s += max(result.duration_s, 0.0)
        elif turn is not None and (not result.computed or any(name in turn.members for name, _ in result.computed)):
            turn.left_tokens -= 1

    def on_request_end(self, request_id: RequestId) -> None:
        if request_id in self._rounds:
            self._rounds.remove(request_id)
        if self._turn is not None:
            self._turn.members -= {request_id}

    def report(self) -> dict[str, float]:
        return {"turns": self._num_turns, **self.times.report()}

    def _decode(self, view: StepView, turn: _Turn, members: list[RequestView]) -> ScheduleDecision:
        chosen = {request.request_id for request in members}
        rest = [request.request_id for request in view.requests if request.request_id not in chosen]
        held = frozenset(request.request_id for request in view.requests if request.request_id not in chosen)
        return ScheduleDecision(
            [*(request.request_id for request in members), *rest], held, phase=Phase.DECODE,
            reason=f"turn of {turn.adapter!r}, {turn.left_tokens} steps left",
            reasons=dict.fromkeys(held, "waits for its turn"),
        )  # fmt: skip

    def _prefill(self, view: StepView, waiting: tuple[RequestView, ...]) -> ScheduleDecision:
        by_arrival = sorted(waiting, key=lambda request: request.arrival_s)
        adapter = by_arrival[0].adapter
        group = [request for request in by_arrival if request.adapter == adapter][: self._group_size]
        chosen = {request.request_id for request in group}
        others = [request.request_id for request in by_arrival if request.request_id not in chosen]
        running = sorted(view.running, key=lambda request: request.arrival_s)
        order = [*(request.request_id for request in group), *others, *(request.request_id for request in running)]
        reason = f"prompts of {adapter!r}, whose request has waited longest"
        # An engine without room for a prompt decodes instead: then those of one model only. The others lose nothing, since
        # a step of prompts runs no other request; they come after the next turn.
        next_adapter = self._by_turn(view.running)[0].adapter if running else ""
        held = [*others, *(request.request_id for request in running if request.adapter != next_adapter)]
        return ScheduleDecision(order, frozenset(held), reason=reason, phase=Phase.PREFILL)

    def _by_turn(self, running: tuple[RequestView, ...]) -> list[RequestView]:
        """Longest without a decode step first."""
        last = {request_id: place for place, request_id in enumerate(self._rounds)}
        return sorted(running, key=lambda request: (last.get(request.request_id, -1), request.arrival_s))

    def _next_turn(self, running: tuple[RequestView, ...]) -> _Turn:
        """The batch with the request that has not decoded for longest, and its quota among the batches of this round."""
        groups: dict[str, list[RequestView]] = {}
        for request in self._by_turn(running):
            groups.setdefault(request.adapter, []).append(request)
        batches = [
            group[start : start + self._batch_size]
            for group in groups.values()
            for start in range(0, len(group), self._batch_size)
        ]
        self._fill_s += (self._filled_s - self._fill_s) / RECENT_TURNS
        self._filled_s = 0.0
        batch = batches[0]  # the first group is the one of the request that is due
        seconds = self._quotas(batches, len(groups))[0]
        members = frozenset(request.request_id for request in batch)
        self._rounds = [request_id for request_id in self._rounds if request_id not in members]
        self._rounds += [request.request_id for request in batch]
        self._num_turns += 1
        tokens = int(min(max(seconds / self._token_s(batch), MIN_TOKENS), 10_000)) if len(batches) > 1 else 1
        return _Turn(batch[0].adapter, members, tokens)

    def _quotas(self, batches: list[list[RequestView]], num_groups: int) -> list[float]:
        owed = [min(self._owed(request) for request in batch) for batch in batches]
        switches_s = 0.0
        if num_groups > 1 and self._switch_s > 0:  # prompts come between two turns, as switches do
            switches_s = self._switch_s * num_groups + self._fill_s * len(batches)
        longest_s = min(self._max_turn_s, MAX_ROUND_S / len(batches))
        return quotas([self._token_s(batch) for batch in batches], [max(each, 1e-6) for each in owed], switches_s, longest_s)

    def _owed(self, request: RequestView) -> float:
        asked_s = request.service.tpot_s
        return self._tpot_s if asked_s == math.inf else asked_s

    def _token_s(self, batch: list[RequestView]) -> float:
        return max(self.times.decode_s(len(batch), sum(request.num_tokens for request in batch)), 1e-6)
