"""Requests that can still meet their targets, in the order in which they are due, and how long each can wait."""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sagellm.core.hooks import Phase, RequestId, RequestView, StepResult, StepView
from sagellm.core.step_times import StepTimes
from sagellm.scheduler_ir.strategies.options import check_count, check_number
from sagellm.scheduler_ir.strategies.ordering import unfinished_tokens

__all__ = ["Ranked", "SlackOrder", "optional_seconds"]

LIKELY_TOKENS = 256  # of an answer at most, before any has ended: a limit is often all that the context leaves
RECENT = 32  # answers over which the mean length looks back, about
LOST_TOKENS = 8  # a stream so many tokens behind, whose end is unknown, does not catch up


@dataclass(frozen=True, slots=True)
class Ranked:
    """The queue by urgency. Times in seconds.

    Attributes:
        waiting, running: most urgent first.
        slack_s: of who waits: how long its prefill may be put off; infinity without a target, below 0 too late.
        stream_slack_s: how long the next decode step may be put off, so that no stream that can be saved misses its target.
        decode_s: expected of one decode step of all that run.
        due_s: when each one's next token should be there, less what comes after it where a deadline is near; on the engine's
            clock, infinity without a target.
        patience_s: how long a step of prompts may be put off so that the first that waits, and all that can, are in time each.
        first_due_s: the least `due_s` of those that wait and can be in time, or infinity.
    """

    waiting: list[RequestView]
    running: list[RequestView]
    slack_s: dict[RequestId, float]
    stream_slack_s: list[float]
    decode_s: float
    due_s: dict[RequestId, float]
    patience_s: float
    first_due_s: float
    reasons: dict[RequestId, str] = field(default_factory=dict)

    @property
    def order(self) -> list[RequestId]:
        return [request.request_id for request in (*self.waiting, *self.running)]


class SlackOrder:
    """Orders a queue by when each is due, as long as it can be in time.

    A waiting request that cannot meet its target any more goes after those that can. If it cannot after those that are due
    before it, the longest of these gives way (Moore and Hodgson's rule, which keeps the most jobs on time). Between
    both are those that have no target. A deadline is that of the last token: the answer is taken to be as long as recent ones
    were, and no longer than its limit. To avoid starvation, each `rescue_every`-th step of prompts begins with the
    request that has waited longest: with n older ones waiting, after `rescue_every` * (n + 1) such steps at the latest.
    """

    def __init__(self, name: str, times: StepTimes, ttft_s: float, tpot_s: float, rescue_every: object) -> None:
        self._times = times
        self._ttft_s, self._tpot_s = ttft_s, tpot_s
        self._rescue_every = check_count(name, "rescue_every", rescue_every, 2)
        self._num_prefills = 0
        self._generated: dict[RequestId, int] = {}
        self._mean_tokens, self._num_ended = float(LIKELY_TOKENS), 0

    def on_step_end(self, result: StepResult) -> None:
        self._num_prefills += result.phase is Phase.PREFILL

    def on_request_end(self, request_id: RequestId) -> None:
        generated = self._generated.pop(request_id, 0)
        if generated:
            self._num_ended = min(self._num_ended + 1, RECENT)
            self._mean_tokens += (generated - self._mean_tokens) / self._num_ended

    def rank(self, view: StepView) -> Ranked:
        """O(n log n) in requests."""
        waiting, running = view.waiting, view.running
        self._generated.update((request.request_id, request.num_generated) for request in view.requests)
        num_streams = max(len(running) + view.num_in_flight, 1)
        decode_s = self._times.decode_s(num_streams, sum(request.num_tokens for request in running))
        dues = {request.request_id: self._due_s(request, decode_s) for request in (*waiting, *running)}
        in_time, free, late, slack_s = self._admit(waiting, dues, view.now_s)
        ordered = [*in_time, *free, *late]
        reasons = {request.request_id: "cannot meet its target: behind those that can" for request in late}
        if ordered and self._num_prefills % self._rescue_every == self._rescue_every - 1:
            oldest = min(ordered, key=lambda request: request.arrival_s)
            ordered.remove(oldest)
            ordered.insert(0, oldest)
            reasons[oldest.request_id] = "waited longest: its turn"
        streams = [
            dues[request.request_id] - view.now_s - decode_s
            for request in running
            if not self._is_lost(request, dues[request.request_id], view.now_s, decode_s)
        ]
        by_due = sorted(running, key=lambda request: (dues[request.request_id], request.arrival_s))
        slacks = [slack_s[request.request_id] for request in (*in_time, *ordered[:1])]
        first_due_s = min((dues[request.request_id] for request in in_time), default=math.inf)
        patience_s = min(slacks, default=math.inf)
        return Ranked(ordered, by_due, slack_s, streams, decode_s, dues, patience_s, first_due_s, reasons)

    def _admit(
        self, waiting: Sequence[RequestView], dues: dict[RequestId, float], now_s: float
    ) -> tuple[list[RequestView], list[RequestView], list[RequestView], dict[RequestId, float]]:
        """In time by due time, without a target and too late by arrival, and each one's slack."""
        base_s = self._times.prefill_s(0)
        costs = {
            request.request_id: max(
                self._times.prefill_s(unfinished_tokens(request), max(request.num_computed, 0)) - base_s, 0.0
            )
            for request in waiting
        }
        slack_s = {
            request.request_id: dues[request.request_id] - now_s - base_s - costs[request.request_id] for request in waiting
        }
        aimed = [request for request in waiting if dues[request.request_id] != math.inf]
        aimed.sort(key=lambda request: (dues[request.request_id], request.arrival_s))
        late = {request.request_id for request in aimed if slack_s[request.request_id] < 0}  # even alone
        taken: list[tuple[float, int, RequestId]] = []  # a heap, the longest first
        elapsed_s = base_s
        for place, request in enumerate(aimed):
            name = request.request_id
            if name in late:
                continue
            heapq.heappush(taken, (-costs[name], -place, name))
            elapsed_s += costs[name]
            if now_s + elapsed_s > dues[name]:
                cost, _, longest = heapq.heappop(taken)
                elapsed_s += cost
                late.add(longest)
        free = _by_arrival(request for request in waiting if dues[request.request_id] == math.inf)
        behind = _by_arrival(request for request in aimed if request.request_id in late)
        return [request for request in aimed if request.request_id not in late], free, behind, slack_s

    def _due_s(self, request: RequestView, decode_s: float) -> float:
        """When its next token should be there. TPOT is an average: who was quick has time left."""
        service = request.service
        if request.num_generated > 0:
            due_s = request.first_token_s + request.num_generated * self._tpot_of(request)
        else:
            due_s = request.arrival_s + (self._ttft_s if service.ttft_s == math.inf else service.ttft_s)
        return min(due_s, service.deadline_s - max(self._left(request) - 1, 0) * decode_s)

    def _tpot_of(self, request: RequestView) -> float:
        asked_s = request.service.tpot_s
        return self._tpot_s if asked_s == math.inf else asked_s

    def _left(self, request: RequestView) -> int:
        """Tokens of its answer that are still to come, most likely; 0 where it has no limit or is longer than most."""
        return max(min(request.max_new_tokens, math.ceil(self._mean_tokens)) - request.num_generated, 0)

    def _is_lost(self, request: RequestView, due_s: float, now_s: float, decode_s: float) -> bool:
        """Whether a stream has no target, or does not meet it even if all steps from now on were decode steps."""
        if due_s == math.inf:
            return True
        tpot_s = self._tpot_of(request)
        left = self._left(request)
        if left <= 0:
            return now_s + decode_s > due_s + LOST_TOKENS * min(tpot_s, decode_s)
        if tpot_s == math.inf:  # a deadline alone
            return now_s + decode_s > due_s
        return now_s + left * decode_s > due_s + (left - 1) * tpot_s


def optional_seconds(strategy: str, option: str, value: object) -> float:
    """An option in seconds; infinity where it is None. Raises PlanError: not a number above 0."""
    return math.inf if value is None else check_number(strategy, option, value, 1e-6)


def _by_arrival(requests: Iterable[RequestView]) -> list[RequestView]:
    return sorted(requests, key=lambda request: request.arrival_s)
