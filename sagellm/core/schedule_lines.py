"""`schedule` and `step` lines of a record: all that a plug-in was told of steps, to be told again, and all that it chose."""

import math
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from sagellm.core.scheduling import (
    NO_SERVICE,
    Phase,
    RequestId,
    RequestView,
    ScheduleDecision,
    StepResult,
    StepView,
)

__all__ = [
    "LEFT", "QUEUE_FIELDS", "TERM_FIELDS", "TIME_FIELDS", "VIEW_FIELDS", "ScheduleLines", "ns_of", "queue_row", "step_line",
]  # fmt: skip

# These tables say how a record has the view of a strategy. By field of `StepView`, its name in the line of a step.
VIEW_FIELDS = {
    "step": "step", "free_blocks": "free_blocks", "num_in_flight": "in_flight", "token_budget": "limit",
    "max_batch_size": "max_batch",
}  # fmt: skip
# A row of `queue`: these fields of `RequestView`, and the times once it has a token. A row of `terms`: the request, these, and
# the fields of `ServiceLevel` if it asked for any.
QUEUE_FIELDS = ("request_id", "phase", "num_tokens", "num_computed", "num_generated", "num_blocks")
TIME_FIELDS = ("first_token_s", "last_token_s")
TERM_FIELDS = ("arrival_s", "max_new_tokens", "adapter")
_queue_of, _times_of, _terms_of = (attrgetter(*names) for names in (QUEUE_FIELDS, TIME_FIELDS, TERM_FIELDS))
_NO_TIMES = (math.inf,) * len(TIME_FIELDS)

LEFT = "engine"  # the `choice` of who leaves a step to the engine

Terms = tuple[Any, ...]


def ns_of(time_s: float) -> int:
    return round(time_s * 1e9)


class ScheduleLines:
    """Lines of one queue of an engine.

    Facts that stay while a request lives are written with the first line that has it, and
    again if it changes; so a reader needs the lines from the first on. The fields are in this package's README.

    Clocks give whole nanoseconds, which take half the place of seconds when they count back from the view's `now_s`. A time
    that would not come back bit by bit is written in seconds, as a number with a point.
    """

    def __init__(self) -> None:
        self._told: dict[RequestId, Terms] = {}
        self._groups: dict[RequestId, RequestId | None] = {}

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """They have ended; others may get their numbers."""
        for request in request_ids:
            self._told.pop(request, None)
            self._groups.pop(request, None)

    def fields(
        self, policy: str, view: StepView, decision: ScheduleDecision | None, phase: Phase | None
    ) -> dict[str, Any]:
        """Fields of a line. `decision`: checked, or None where the step was left to the engine. `phase`: what the engine did
        then; None where no step came of it. O(requests)."""
        line: dict[str, Any] = dict(policy=policy, phase=None if phase is None else phase.value)
        if decision is None:
            line["choice"] = LEFT
        else:
            line |= dict(
                order=None if decision.order is None else list(decision.order), hold=sorted(decision.hold),
                token_budget=decision.token_budget, wanted=None if decision.phase is None else decision.phase.value,
                chunk_tokens=dict(decision.chunk_tokens), reason=decision.reason, reasons=dict(decision.reasons),
            )  # fmt: skip
            if decision.draft_tokens:
                line["draft_tokens"] = dict(decision.draft_tokens)
            if decision.collectives:
                line["collectives"] = list(map(list, decision.collectives))
        now_ns = ns_of(view.now_s)
        terms = [row for request in view.requests if (row := self._news(request)) is not None]
        line |= dict(now_s=view.now_s, own=view.phase.value, queue=[_row(request, now_ns) for request in view.requests])
        if terms:
            line["terms"] = terms
        if groups := self._new_groups(view.requests):
            line["groups"] = groups
        return line | {field: getattr(view, name) for name, field in VIEW_FIELDS.items()}

    def _new_groups(self, requests: Iterable[RequestView]) -> dict[RequestId, RequestId | None]:
        """Groups that have not been told, by request."""
        told = self._groups
        new = {each.request_id: each.group_id for each in requests if told.get(each.request_id) != each.group_id}
        self._groups |= new
        return new

    def _news(self, request: RequestView) -> list[Any] | None:
        """A row of `terms`, unless it has been told."""
        service = request.service
        terms = *_terms_of(request), service
        if self._told.get(request.request_id) == terms:
            return None
        self._told[request.request_id] = terms
        self._groups.pop(request.request_id, None)  # a reader forgets it with the former terms
        row = [request.request_id, *terms[:-1]]
        return row if service == NO_SERVICE else [*row, *[None if each == math.inf else each for each in service]]


def step_line(result: StepResult) -> dict[str, Any]:
    """Fields of the record's `step` line: all that plug-ins are told of it, in full, so that they can be told it again."""
    refused = {"refused": dict(result.refused)} if result.refused else {}
    return dict(
        step=result.step, phase=result.phase.value, requests=result.num_requests, tokens=result.num_tokens,
        context=result.num_context_tokens, seconds=result.duration_s, end_s=result.end_s, bytes_in=result.bytes_in,
        bytes_out=result.bytes_out, swap_seconds=result.swap_s, computed=result.computed, **refused,
    )  # fmt: skip


def queue_row(request: RequestView) -> list[Any]:
    """The values of `QUEUE_FIELDS`, the phase by name."""
    request_id, phase, *counts = _queue_of(request)
    return [request_id, phase.value, *counts]


def _row(request: RequestView, now_ns: int) -> list[Any]:
    row, times = queue_row(request), _times_of(request)
    return row if times == _NO_TIMES else [*row, *[_before(each, now_ns) for each in times]]


def _before(time_s: float, now_ns: int) -> int | float | None:
    """Nanoseconds before now, or the time itself; None for infinity."""
    if time_s == math.inf:
        return None
    time_ns = ns_of(time_s)
    return now_ns - time_ns if time_ns / 1e9 == time_s else float(time_s)
