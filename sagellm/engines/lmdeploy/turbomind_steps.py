"""Admission and scheduling of TurboMind's steps, as the contract has them.

TurboMind computes prompts and decodes in one step; the contract's steps have one phase. A step in which any sequence still
has prompt tokens to compute is a prefill step, and each request says its own phase.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sagellm.core.answers import check_admission, check_schedule
from sagellm.core.config import HookConfig
from sagellm.core.hooks import COALESCE_S, Phase, RequestMetadata, RequestView, StepView
from sagellm.core.host import PluginHost
from sagellm.core.schedule_lines import ScheduleLines

HOLD = np.uint64(2**64 - 1)  # SAGE_PRIORITY_HOLD
UNCUT = "TurboMind cuts prompts by the token budget alone"

Where = tuple[int, int]  # engine, group


@dataclass(slots=True)
class _Known:
    """Facts about a request while the engine names it."""

    arrival_s: float
    num_prompt: int
    asked_s: float = -math.inf  # when the plug-in last said whether it may join
    refused_since: float | None = None
    held_since: float | None = None
    is_admitted: bool = False


class StepDecisions:
    """Asks the owner of `admit` and of `schedule`. Called on the thread that serves the port."""

    def __init__(self, host: PluginHost, config: HookConfig) -> None:
        self._host = host
        self._hold_limit_s = config.hold_limit_s
        self._waiting: dict[Where, dict[int, _Known]] = {}
        self._running: dict[Where, dict[int, _Known]] = {}
        self._left: dict[Where, tuple[float, list[int]]] = {}  # steps left to the engine: until when, which requests
        self._refused: dict[Where, tuple[int, tuple[tuple[int, str], ...]]] = {}  # of the step decided last
        self._lines: dict[Where, ScheduleLines] = {}

    def admit(self, question: Any, until_s: float) -> list[int] | None:
        """Places of the requests that may join the batch; None leaves it to the engine.

        Those that the plug-in has no time for now wait, and are asked for first the next time.
        """
        where = question.engine, question.group
        before, now = self._waiting.get(where, {}), time.perf_counter()
        ids, tokens = question.request_ids.tolist(), question.request_tokens.tolist()
        known = {request: before.get(request) or _Known(now, n) for request, n in zip(ids, tokens, strict=True)}
        self._waiting[where] = known
        room = question.max_admitted - sum(own.is_admitted for own in known.values())
        asked = self._to_ask(known) if room > 0 else []
        if asked and not self._ask_admission(known, asked, room, until_s):
            return None
        refused = ((request, own.refused_since) for request, own in known.items() if not own.is_admitted)
        if any(self._overdue("admit", request, since_s) for request, since_s in refused if since_s is not None):
            return None
        if not self._host.decides("admit"):
            return None
        return [place for place, request in enumerate(ids) if known[request].is_admitted][: question.max_admitted]

    def _to_ask(self, known: dict[int, _Known]) -> list[int]:
        """Never asked for first, then those refused longest ago; one refused a moment ago stays so for that moment."""
        last_s = time.monotonic() - COALESCE_S
        due = [request for request, own in known.items() if not own.is_admitted and own.asked_s <= last_s]
        return sorted(due, key=lambda request: known[request].asked_s)

    def _ask_admission(self, known: dict[int, _Known], asked: list[int], room: int, until_s: float) -> bool:
        """False: the plug-in is off, or did not come to this question."""
        num_admitted = 0

        def check(answer: Any) -> bool:
            nonlocal num_admitted
            admitted = check_admission(answer)
            num_admitted += admitted
            return admitted

        def views() -> Iterator[RequestMetadata]:
            for request in asked:
                if num_admitted == room:
                    return
                own = known[request]
                yield RequestMetadata(request, Phase.PREFILL, own.num_prompt, 0, own.arrival_s)

        decided = self._host.decide_each("admit", views(), check, until_s)
        if decided is None or not decided[1]:
            return False
        name, answers = decided
        now_s = time.monotonic()
        for request, admitted in zip(asked, answers, strict=False):
            own = known[request]
            if admitted or own.refused_since is None:  # else it was refused before, and is on record
                self._host.recorder.write("admit", policy=name, request=request, admitted=admitted)
            own.is_admitted, own.asked_s = admitted, now_s
            if not admitted and own.refused_since is None:
                own.refused_since = time.perf_counter()
        return True

    def schedule(self, question: Any, until_s: float) -> tuple[np.ndarray, int] | None:
        """(one priority a sequence, the budget of new tokens); None leaves the step to the engine."""
        where = question.engine, question.group
        ids = question.seq_ids.tolist()
        if self._is_left(where, ids):
            return None
        requests = self._requests(where, question, ids)
        phase = Phase.PREFILL if any(r.phase is Phase.PREFILL for r in requests) else Phase.DECODE
        view = StepView(
            step=question.step, phase=phase, requests=requests, free_blocks=question.free_blocks,
            token_budget=question.default_budget, now_s=time.perf_counter(),
        )  # fmt: skip
        decided = self._host.decide("schedule", view, lambda answer: check_schedule(answer, view), until_s)
        known = self._running[where]
        if decided is not None and self._host.recorder.enabled:
            line = self._lines.setdefault(where, ScheduleLines()).fields(decided[0], view, decided[1], phase)
            self._host.recorder.write("schedule", **line)
        if decided is None or decided[1] is None:
            if decided is not None:
                self._left[where] = time.monotonic() + COALESCE_S, ids
            for request in known.values():
                request.held_since = None
            return None
        decision = decided[1]
        if self._holds_too_long(decision.hold, known):
            return None
        self._refused[where] = question.step, tuple((request, UNCUT) for request in decision.chunk_tokens)
        budget = min(decision.token_budget or question.default_budget, question.default_budget)
        return _priorities(question.priorities, ids, decision.order, decision.hold), max(budget, 1)

    def refused(self, where: Where, step: int) -> tuple[tuple[int, str], ...]:
        """Wishes of the decision about this step that the engine could not carry out."""
        decided, refused = self._refused.get(where, (-1, ()))
        return refused if decided == step else ()

    def _requests(self, where: Where, question: Any, ids: list[int]) -> tuple[RequestView, ...]:
        """In the engine's own order, which is that of the priorities."""
        before, waited, now = self._running.get(where, {}), self._waiting.get(where, {}), time.perf_counter()
        known: dict[int, _Known] = {}
        rows = []
        columns = (
            question.priorities, question.context_lens, question.cache_lens, question.num_blocks, question.num_prompts,
        )  # fmt: skip
        for seq_id, priority, context, computed, blocks, prompt in zip(ids, *(c.tolist() for c in columns), strict=True):
            own = before.get(seq_id) or waited.get(seq_id) or _Known(now, 0)
            if seq_id not in before:
                own.num_prompt = _first_seen(max(own.num_prompt, prompt), context, computed)
            own.num_prompt = max(own.num_prompt, prompt)
            known[seq_id] = own
            total = max(context, own.num_prompt)
            row = RequestView(
                request_id=seq_id,
                phase=Phase.PREFILL if computed < own.num_prompt or total - computed > 1 else Phase.DECODE,
                num_tokens=total,
                num_computed=computed,
                num_generated=total - own.num_prompt,
                num_blocks=blocks,
                arrival_s=own.arrival_s,
            )
            rows.append((priority, row))
        self._running[where] = known
        if where in self._lines:
            self._lines[where].forget(before.keys() - known.keys())
        return tuple(row for _, row in sorted(rows, key=lambda pair: pair[0]))

    def _is_left(self, where: Where, ids: list[int]) -> bool:
        until_s, left = self._left.get(where, (0.0, []))
        return time.monotonic() < until_s and left == ids

    def _holds_too_long(self, hold: frozenset[int], known: dict[int, _Known]) -> bool:
        now = time.perf_counter()
        for request, own in known.items():
            own.held_since = (own.held_since or now) if request in hold else None
        return any(self._overdue("schedule", request, known[request].held_since) for request in hold)

    def _overdue(self, hook: str, request: int, since_s: float) -> bool:
        return self._host.is_overdue(hook, request, time.perf_counter() - since_s, self._hold_limit_s)


def _first_seen(told: int, context: int, computed: int) -> int:
    """Tokens of the prompt of a sequence that was in no step before. The engine gives none for a request with images.

    Where more than one token is to be computed all of them are taken for prompt; else the last one was generated.
    """
    if computed == 0 or context - computed > 1:
        return max(told, context)
    return told or context - 1


def _priorities(given: np.ndarray, ids: list[int], order: list[int], hold: frozenset[int]) -> np.ndarray:
    """The engine's own priorities, handed out in the new order: so they stay distinct."""
    rank = {request: place for place, request in enumerate(order)}
    in_order = np.sort(given)
    return np.array([HOLD if seq_id in hold else in_order[rank[seq_id]] for seq_id in ids], np.uint64)
