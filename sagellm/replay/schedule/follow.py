"""Follows the requests of a log through its steps: how many tokens each has computed, and when it got which token.

Where `step` lines do not say who was in them, prompts are told apart by their lookups: LMDeploy looks a request up when it
lets it into a step. The requests of decode steps are then unknown, and only the first and the last token of a request are
known.
"""

import math
from dataclasses import dataclass, field

from sagellm.core.hooks import Phase, ServiceLevel
from sagellm.core.step_times import num_pairs
from sagellm.replay.traces.lines import Broken
from sagellm.scheduler_ir.simulation.base import StepRun

Rows = tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Followed:
    number: int
    arrival_s: float
    prompt_tokens: int
    max_new: int
    service: ServiceLevel
    have: int = 0  # tokens that are computed
    cached_tokens: int = 0
    has_run: bool = False
    is_waiting: bool = True  # for a step of prompts
    has_ended: bool = False
    num_generated: int = 0  # told by its end
    first_s: float = math.inf
    last_s: float = math.inf
    token_s: list[float] = field(default_factory=list)
    tokens: int = 0  # prompt and answer so far

    @property
    def is_complete(self) -> bool:
        return self.has_ended and self.num_generated > 0 and math.isfinite(self.first_s)


class Follower:
    """`known`: by request id, also those that ended. Every method raises Broken for what cannot be."""

    def __init__(self) -> None:
        self.known: dict[int, Followed] = {}
        self.steps: list[StepRun] = []
        self.num_preempted = 0
        self._looked_up: list[Followed] = []  # that no step of prompts has taken yet, in that order
        self._tells_rows: bool | None = None

    def arrive(self, number: int, time_s: float, tokens: int, max_new: int, service: ServiceLevel) -> None:
        if number in self.known:
            raise Broken(f"request {number} arrives a second time.")
        self.known[number] = Followed(number, time_s, tokens, max_new, service, tokens=tokens)

    def lookup(self, number: int, matched: int, tokens: int) -> None:
        request = self._running(number)
        if request.have + matched >= max(tokens, request.tokens):
            raise Broken(f"request {number} found {request.have + matched} of {tokens} tokens; the last one is never cached.")
        request.have += matched
        request.tokens = max(tokens, request.tokens)
        if not request.has_run:
            request.cached_tokens = request.have
        if request.is_waiting and request not in self._looked_up:
            self._looked_up.append(request)

    def preempt(self, number: int, tokens: int) -> None:
        """`tokens`: of its prompt and its answer so far; all but the last are computed, until it loses its blocks."""
        request = self._running(number)
        request.is_waiting = True
        request.tokens, request.have = tokens, max(tokens - 1, 0)
        self.num_preempted += 1

    def lose(self, number: int) -> None:
        request = self.known.get(number)
        if request is None:
            raise Broken(f"request {number} loses its blocks and has not arrived.")
        request.have = 0
        if not request.has_run:
            request.cached_tokens = 0

    def end(self, number: int, generated: int) -> None:
        request = self._running(number)
        request.has_ended, request.num_generated = True, generated
        if request in self._looked_up:
            self._looked_up.remove(request)
        if request.token_s:
            # A round of decode steps goes on for a request that has ended in it; those tokens are dropped.
            del request.token_s[generated:]
            request.last_s = request.token_s[-1] if request.token_s else math.inf
        elif self.steps:
            request.last_s = max(self.steps[-1].end_s, request.first_s) if generated > 1 else request.first_s

    def step(
        self, number: int, phase: str, end_s: float, duration_s: float, num_requests: int, num_tokens: int, context: int,
        rows: Rows | None,
    ) -> None:  # fmt: skip
        if num_requests < 1:
            raise Broken("requests is 0; a step has at least 1.")
        if rows is not None and (len(rows) != num_requests or sum(new for _, new in rows) != num_tokens):
            raise Broken(
                f"computed names {len(rows)} requests and {sum(new for _, new in rows)} tokens; requests is {num_requests} "
                f"and tokens {num_tokens}."
            )
        self._tells_rows = rows is not None
        if phase == "decode":
            attention = float(context)
            for request, _ in rows or ():
                self._decode(request, end_s)
        else:
            rows = rows if rows is not None else self._guessed(num_requests, num_tokens)
            attention = num_pairs(num_tokens, context, num_requests)
            if rows is not None:
                attention = sum([self._prefill(request, new, end_s) for request, new in rows])
        self.steps.append(StepRun(number, Phase(phase), end_s, duration_s, num_requests, num_tokens, attention, rows))

    def _prefill(self, number: int, new: int, end_s: float) -> float:
        """Returns what its tokens look at, summed."""
        request = self._running(number, may_have_ended=True)
        attention = num_pairs(new, request.have)
        request.have += new
        request.has_run = True
        if request.have >= request.tokens:
            request.is_waiting = False
            self._give(request, end_s)
        return attention

    def _decode(self, number: int, end_s: float) -> None:
        request = self._running(number, may_have_ended=True)
        request.have += 1
        self._give(request, end_s)

    def _give(self, request: Followed, end_s: float) -> None:
        request.tokens += 1
        request.first_s = min(request.first_s, end_s)
        request.last_s = end_s
        if self._tells_rows and not request.has_ended:
            request.token_s.append(end_s)

    def _guessed(self, num_requests: int, num_tokens: int) -> Rows | None:
        """Return the requests of a step of prompts: those looked up first, if their tokens make the sum, or those that
        came first."""
        waiting = sorted(
            (each for each in self.known.values() if each.is_waiting and not each.has_ended),
            key=lambda each: (each.arrival_s, each.number),
        )
        for queue in (self._looked_up, waiting):
            chosen = queue[:num_requests]
            rows = tuple((each.number, each.tokens - each.have) for each in chosen)
            if len(rows) == num_requests and sum(new for _, new in rows) == num_tokens:
                self._looked_up = [each for each in self._looked_up if each not in chosen]
                return rows
        self._looked_up = self._looked_up[num_requests:]
        return None

    def _running(self, number: int, may_have_ended: bool = False) -> Followed:
        request = self.known.get(number)
        if request is None:
            raise Broken(f"request {number} has not arrived.")
        if request.has_ended and not may_have_ended:
            raise Broken(f"request {number} has ended.")
        return request
