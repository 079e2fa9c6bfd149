"""Decisions as lines: the `schedule` lines of an event log, written by a virtual run and read from anybody's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.core.errors import ConfigError, TraceError
from sagellm.core.hooks import Phase, RequestId, ScheduleDecision, StepView
from sagellm.replay.base import MAX_KEY, shortened
from sagellm.replay.traces.json_lines import member, parse_object
from sagellm.replay.traces.lines import BadLines, Broken, open_text
from sagellm.replay.traces.rows import whole

__all__ = ["DecisionLine", "decision_line", "first_difference", "read_decisions", "write_decisions"]

Row = tuple[RequestId, str, int, int, int, int]


@dataclass(frozen=True, slots=True)
class DecisionLine:
    """What a scheduler was told, what it chose, and why. `time_s` is no part of comparisons by `first_difference`.

    Attributes:
        phase: what came next.
        queue: request, prefill or decode, its tokens, those that are computed, those generated, and its blocks.
        limit, max_batch: the engine's limits of new tokens in a step with prompts, and of requests.
    """

    time_s: float
    policy: str
    step: int
    phase: Phase
    order: tuple[RequestId, ...]
    hold: tuple[RequestId, ...]
    token_budget: int | None
    chunk_tokens: dict[RequestId, int]
    reason: str
    reasons: dict[RequestId, str]
    queue: tuple[Row, ...]
    free_blocks: int
    in_flight: int
    limit: int
    max_batch: int


CHOICE = ("phase", "order", "hold", "token_budget", "chunk_tokens")


def decision_line(policy: str, view: StepView, decision: ScheduleDecision, phase: Phase) -> DecisionLine:
    """`phase`: what the engine did about it."""
    queue = tuple(
        (row.request_id, row.phase.value, row.num_tokens, row.num_computed, row.num_generated, row.num_blocks)
        for row in view.requests
    )
    order = tuple(decision.order) if decision.order is not None else tuple(row[0] for row in queue)
    return DecisionLine(
        round(view.now_s, 9), policy, view.step, phase, order, tuple(sorted(decision.hold)), decision.token_budget,
        dict(decision.chunk_tokens), decision.reason, dict(decision.reasons), queue, view.free_blocks, view.num_in_flight,
        view.token_budget, view.max_batch_size,
    )  # fmt: skip


def write_decisions(path: Path, lines: Sequence[DecisionLine]) -> None:
    """A file of its own; what was there is replaced. Raises ConfigError: it cannot be written."""
    texts = []
    for number, line in enumerate(lines):
        head = {"t_ns": round(line.time_s * 1e9), "n": number, "pid": 0, "event": "schedule"}
        body = {name: getattr(line, name) for name in DecisionLine.__slots__ if name != "time_s"}
        texts.append(json.dumps({**head, **body, "phase": line.phase.value}) + "\n")
    try:
        path.write_text("".join(texts), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file with --decisions.") from None


def read_decisions(path: Path) -> list[DecisionLine]:
    """The `schedule` lines of a file, whatever else it holds. Raises TraceError: it cannot be read, or a line is malformed."""
    file = open_text(path)
    bad = BadLines(file.name)
    found = [line for _, line in file.parse(_parse, bad) if line is not None]
    if not found:
        raise TraceError(f"{file.name} holds no schedule lines; give what --decisions wrote, or a log with decisions.")
    return found


def first_difference(ours: Sequence[DecisionLine], theirs: Sequence[DecisionLine]) -> tuple[int, str] | None:
    """(index, field) of the first decision whose choice differs; an index past the end of one of them has no field."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        for name in ("queue", *CHOICE):
            if getattr(mine, name) != getattr(other, name):
                return index, name
    return None if len(ours) == len(theirs) else (min(len(ours), len(theirs)), "")


def _parse(line: bytes) -> DecisionLine | None:
    row = parse_object(line)
    if member(row, "event") != "schedule":
        return None
    phase, hold, budget = member(row, "phase"), member(row, "hold"), member(row, "token_budget")
    if phase not in ("prefill", "decode"):
        raise Broken(f"phase is {shortened(phase)}; prefill or decode was expected.")
    names = ("step", "free_blocks", "in_flight", "limit", "max_batch")
    counts = {name: whole(member(row, name), name, MAX_KEY) for name in names}
    chunks = {key: whole(tokens, "chunk_tokens") for key, tokens in _by_request(row, "chunk_tokens").items()}
    return DecisionLine(
        whole(member(row, "t_ns"), "t_ns", MAX_KEY) / 1e9, str(member(row, "policy")), counts["step"], Phase(phase),
        _ids(member(row, "order"), "order"), _ids(hold, "hold"), None if budget is None else whole(budget, "token_budget"),
        chunks, str(member(row, "reason")), {key: str(why) for key, why in _by_request(row, "reasons").items()},
        tuple(_queue_row(each) for each in _list(member(row, "queue"), "queue")), counts["free_blocks"],
        counts["in_flight"], counts["limit"], counts["max_batch"],
    )  # fmt: skip


def _list(value: Any, name: str) -> list[Any]:
    if type(value) is not list:
        raise Broken(f"{name} is {shortened(value)}; a list was expected.")
    return value


def _ids(value: Any, name: str) -> tuple[RequestId, ...]:
    return tuple(whole(request, f"a request of {name}", MAX_KEY) for request in _list(value, name))


def _by_request(row: dict[str, Any], name: str) -> dict[RequestId, Any]:
    value = member(row, name)
    if type(value) is not dict or not all(key.isascii() and key.isdigit() for key in value):
        raise Broken(f"{name} is {shortened(value)}; an object by request was expected.")
    return {RequestId(int(key)): each for key, each in value.items()}


def _queue_row(value: Any) -> Row:
    if type(value) is not list or len(value) != 6 or value[1] not in ("prefill", "decode"):
        raise Broken(f"a row of queue is {shortened(value)}; request, prefill or decode, and four counts were expected.")
    request, phase, *counts = value
    tokens, computed, generated, blocks = (whole(count, "a count of queue", MAX_KEY) for count in counts)
    return whole(request, "a request of queue", MAX_KEY), phase, tokens, computed, generated, blocks
