"""Admission and scheduling of TurboMind's steps, as the contract has them.

TurboMind computes prompts and decodes in one step; the contract's steps have one phase. A step in which any sequence still
has prompt tokens to compute is a prefill step, and each request says its own phase.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from sagellm.core.answers import check_admission, check_schedule
from sagellm.core.config import HookConfig
from sagellm.core.hooks import COALESCE_S, Phase, RequestMetadata, StepView
from sagellm.core.host import PluginHost

HOLD = np.uint64(2**64 - 1)  # SAGE_PRIORITY_HOLD

Where = tuple[int, int]  # engine, group


@dataclass(slots=True)
class _Known:
    """What is remembered of a request while the engine names it."""

    arrival_s: float
    num_prompt: int
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

    def admit(self, question: Any) -> list[int] | None:
        """Places of the requests that may join the batch; None leaves it to the engine."""
        where = question.engine, question.group
        ids = question.request_ids.tolist()
        before, now = self._waiting.get(where, {}), time.perf_counter()
        tokens = question.request_tokens.tolist()
        known = {r: before.get(r) or _Known(now, n) for r, n in zip(ids, tokens, strict=True)}
        self._waiting[where] = known
        admitted: list[int] = []
        for place, request in enumerate(ids):
            if len(admitted) == question.max_admitted:
                break
            if not self._host.decides("admit"):
                return None
            if self._admits(request, known[request]):
                admitted.append(place)
        return admitted if self._host.decides("admit") else None

    def _admits(self, request: int, known: _Known) -> bool:
        if known.is_admitted:
            return True
        asked = RequestMetadata(request, Phase.PREFILL, known.num_prompt, 0, 0, 0, known.arrival_s)
        decided = self._host.decide("admit", asked, check_admission)
        if decided is None:
            return True
        name, known.is_admitted = decided
        self._host.recorder.write("admit", policy=name, request=request, admitted=known.is_admitted)
        if not known.is_admitted:
            known.refused_since = known.refused_since or time.perf_counter()
            self._overdue("admit", request, known.refused_since)
        return known.is_admitted

    def schedule(self, question: Any) -> tuple[np.ndarray, int] | None:
        """(one priority a sequence, the budget of new tokens); None leaves the step to the engine."""
        where = question.engine, question.group
        ids = question.seq_ids.tolist()
        if self._is_left(where, ids):
            return None
        requests = self._requests(where, question, ids)
        phase = Phase.PREFILL if any(r.phase is Phase.PREFILL for r in requests) else Phase.DECODE
        view = StepView(question.step, phase, requests, question.free_blocks, question.default_budget)
        decided = self._host.decide("schedule", view, lambda answer: check_schedule(answer, view))
        known = self._running[where]
        if decided is None or decided[1] is None:
            if decided is not None:
                self._left[where] = time.monotonic() + COALESCE_S, ids
            for request in known.values():
                request.held_since = None
            return None
        name, decision = decided
        if self._holds_too_long(decision.hold, known):
            return None
        budget = min(decision.token_budget or question.default_budget, question.default_budget)
        self._host.recorder.write(
            "schedule", policy=name, step=question.step, phase=phase.value, order=list(decision.order),
            hold=decision.hold, token_budget=decision.token_budget, reason=decision.reason,
        )  # fmt: skip
        return _priorities(question.priorities, ids, decision.order, decision.hold), max(budget, 1)

    def _requests(self, where: Where, question: Any, ids: list[int]) -> tuple[RequestMetadata, ...]:
        """In the engine's own order, which is that of the priorities."""
        before, waited, now = self._running.get(where, {}), self._waiting.get(where, {}), time.perf_counter()
        known: dict[int, _Known] = {}
        rows = []
        columns = (
            question.priorities, question.context_lens, question.cache_lens, question.num_blocks, question.num_prompts,
        )  # fmt: skip
        for seq_id, priority, context, computed, blocks, prompt in zip(ids, *(c.tolist() for c in columns), strict=True):
            own = before.get(seq_id) or waited.get(seq_id) or _Known(now, prompt)
            own.num_prompt = max(own.num_prompt, prompt)
            known[seq_id] = own
            total = max(context, own.num_prompt)
            row = RequestMetadata(
                request_id=seq_id,
                phase=Phase.PREFILL if computed < own.num_prompt else Phase.DECODE,
                num_tokens=total,
                num_computed=computed,
                num_generated=total - own.num_prompt,
                num_blocks=blocks,
                arrival_s=own.arrival_s,
            )
            rows.append((priority, row))
        self._running[where] = known
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
        """True once a request was kept waiting for too long; the plug-in that did it is then off."""
        waited = time.perf_counter() - since_s
        if waited <= self._hold_limit_s:
            return False
        self._host.blame(hook, f"request {request} was kept waiting for {waited:.1f} s")
        return True


def _priorities(given: np.ndarray, ids: list[int], order: list[int], hold: frozenset[int]) -> np.ndarray:
    """The engine's own priorities, handed out in the new order: so they stay distinct."""
    rank = {request: place for place, request in enumerate(order)}
    in_order = np.sort(given)
    return np.array([HOLD if seq_id in hold else in_order[rank[seq_id]] for seq_id in ids], np.uint64)
