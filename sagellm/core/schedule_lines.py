"""`schedule` and `step` lines of a record: all that a plug-in was told of steps, to be told again, and all that it chose."""

import math
from collections.abc import Iterable
from typing import Any

from sagellm.core.scheduling import (
    NO_SERVICE,
    Phase,
    RequestId,
    RequestMetadata,
    ScheduleDecision,
    StepResult,
    StepView,
)

__all__ = ["LEFT", "ScheduleLines", "ns_of", "step_line"]

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

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """They have ended; others may get their numbers."""
        for request in request_ids:
            self._told.pop(request, None)

    def fields(
        self, policy: str, view: StepView, decision: ScheduleDecision | None, phase: Phase | None
    ) -> dict[str, Any]:
        """Fields of a line. `decision`: checked, or None where the step was left to the engine. `phase`: what the engine did
        then; None where no step came of it. O(requests)."""
        line: dict[str, Any] = dict(policy=policy, step=view.step, phase=None if phase is None else phase.value)
        if decision is None:
            line["choice"] = LEFT
        else:
            line |= dict(
                order=None if decision.order is None else list(decision.order), hold=sorted(decision.hold),
                token_budget=decision.token_budget, wanted=None if decision.phase is None else decision.phase.value,
                chunk_tokens=dict(decision.chunk_tokens), reason=decision.reason, reasons=dict(decision.reasons),
            )  # fmt: skip
        now_ns = ns_of(view.now_s)
        terms = [row for request in view.requests if (row := self._news(request)) is not None]
        line |= dict(now_s=view.now_s, own=view.phase.value, queue=[_row(request, now_ns) for request in view.requests])
        if terms:
            line["terms"] = terms
        return line | dict(
            free_blocks=view.free_blocks, in_flight=view.num_in_flight, limit=view.token_budget, max_batch=view.max_batch_size
        )

    def _news(self, request: RequestMetadata) -> list[Any] | None:
        """A row of `terms`, unless it has been told."""
        service = request.service
        terms = request.arrival_s, request.max_new_tokens, request.adapter, service
        if self._told.get(request.request_id) == terms:
            return None
        self._told[request.request_id] = terms
        row = [request.request_id, *terms[:3]]
        return row if service == NO_SERVICE else [*row, *[None if each == math.inf else each for each in service]]


def step_line(result: StepResult) -> dict[str, Any]:
    """Fields of the record's `step` line: all that plug-ins are told of it, in full, so that they can be told it again."""
    refused = {"refused": dict(result.refused)} if result.refused else {}
    return dict(
        step=result.step, phase=result.phase.value, requests=result.num_requests, tokens=result.num_tokens,
        context=result.num_context_tokens, seconds=result.duration_s, end_s=result.end_s, bytes_in=result.bytes_in,
        bytes_out=result.bytes_out, swap_seconds=result.swap_s, computed=result.computed, **refused,
    )  # fmt: skip


def _row(request: RequestMetadata, now_ns: int) -> list[Any]:
    row = [
        request.request_id, request.phase.value, request.num_tokens, request.num_computed, request.num_generated,
        request.num_blocks,
    ]  # fmt: skip
    times = request.first_token_s, request.last_token_s
    return row if times == (math.inf, math.inf) else [*row, *[_before(each, now_ns) for each in times]]


def _before(time_s: float, now_ns: int) -> int | float | None:
    """Nanoseconds before now, or the time itself; None for infinity."""
    if time_s == math.inf:
        return None
    time_ns = ns_of(time_s)
    return now_ns - time_ns if time_ns / 1e9 == time_s else float(time_s)
