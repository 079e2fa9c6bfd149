"""Decisions as lines: the `schedule` lines of an event log, written by a virtual run and read from anybody's."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.core.collectives import CommRule, read_rules
from sagellm.core.errors import ConfigError, TraceError
from sagellm.core.hooks import Phase, RequestId, RequestView, ScheduleDecision, ServiceLevel, StepView
from sagellm.core.schedule_lines import (
    LEFT,
    QUEUE_FIELDS,
    TERM_FIELDS,
    TIME_FIELDS,
    VIEW_FIELDS,
    ScheduleLines,
    ns_of,
    queue_row,
)
from sagellm.core.scheduling import NO_SERVICE
from sagellm.replay.base import MAX_KEY, shortened
from sagellm.replay.traces.json_lines import member, parse_object
from sagellm.replay.traces.lines import BadLines, Broken, open_text
from sagellm.replay.traces.rows import whole

__all__ = ["DecisionLine", "DecisionReader", "first_difference", "read_decisions", "write_decisions"]

PHASES = {phase.value: phase for phase in Phase}
Row = tuple[RequestId, str, int, int, int, int]


@dataclass(frozen=True, slots=True)
class DecisionLine:
    """A scheduler's view, its choice, and the reason.

    Attributes:
        view: as it was seen, field by field.
        decision: None where the step was left to the engine.
        phase: what the engine did then; None where no step came of it.
    """

    policy: str
    view: StepView
    decision: ScheduleDecision | None
    phase: Phase | None

    @property
    def step(self) -> int:
        return self.view.step

    @property
    def queue(self) -> tuple[Row, ...]:
        """The values of `QUEUE_FIELDS` of each request."""
        return tuple([tuple(queue_row(row)) for row in self.view.requests])


def write_decisions(path: Path, lines: Sequence[DecisionLine]) -> None:
    """A file of its own; what was there is replaced. Raises ConfigError: it cannot be written."""
    texts, fields = [], ScheduleLines().fields
    for number, line in enumerate(lines):
        head = {"t_ns": ns_of(line.view.now_s), "n": number, "pid": 0, "event": "schedule"}
        texts.append(json.dumps(head | fields(line.policy, line.view, line.decision, line.phase)) + "\n")
    try:
        path.write_text("".join(texts), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file with --decisions.") from None


def read_decisions(path: Path) -> list[DecisionLine]:
    """The `schedule` lines of a file, whatever else it holds. Raises TraceError: it cannot be read, or a line is malformed."""
    file, reader = open_text(path), DecisionReader()

    def parse(text: bytes) -> DecisionLine | None:
        row = parse_object(text)
        return reader.read(row) if member(row, "event") == "schedule" else None

    found = [line for _, line in file.parse(parse, BadLines(file.name)) if line is not None]
    if not found:
        raise TraceError(f"{file.name} holds no schedule lines; give what --decisions wrote, or a log with decisions.")
    return found


def first_difference(ours: Sequence[DecisionLine], theirs: Sequence[DecisionLine]) -> tuple[int, str] | None:
    """(index, field) of the first decision whose choice or queue differs, times aside; an index past the end of one of them has
    no field."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        chosen, theirs_chosen = _chosen(mine), _chosen(other)
        for name, value in chosen.items():
            if value != theirs_chosen[name]:
                return index, name
    return None if len(ours) == len(theirs) else (min(len(ours), len(theirs)), "")


def _chosen(line: DecisionLine) -> dict[str, Any]:
    """Requests left to the engine are served in the order of the queue."""
    decision = line.decision or ScheduleDecision()
    order = decision.order if decision.order is not None else [row.request_id for row in line.view.requests]
    return {
        "queue": line.queue, "phase": line.phase, "order": list(order), "hold": decision.hold,
        "token_budget": decision.token_budget, "chunk_tokens": decision.chunk_tokens,
        "draft_tokens": decision.draft_tokens, "collectives": tuple(decision.collectives),
    }  # fmt: skip


class DecisionReader:
    """Makes views and decisions again from the `schedule` lines of a file, given from the first on."""

    def __init__(self) -> None:
        self._terms: dict[tuple[Any, RequestId], dict[str, Any]] = {}  # by process and request

    def read(self, row: dict[str, Any]) -> DecisionLine:
        """Raises Broken: a field is missing, or is not what its name says."""
        if "now_s" not in row:
            raise Broken("it has no now_s; record the run with this version, which writes all that a strategy is told.")
        counts = {field: whole(member(row, field), field, MAX_KEY) for field in VIEW_FIELDS.values()}
        policy, pid = member(row, "policy"), row.get("pid")
        if type(policy) is not str:
            raise Broken(f"policy is {shortened(policy)}; a string was expected.")
        if type(pid) not in (int, str, type(None)):
            raise Broken(f"pid is {shortened(pid)}; a number was expected.")
        now_s = _number(member(row, "now_s"), "now_s")
        for terms in _list(row.get("terms", []), "terms"):
            self._learn(pid, terms)
        for request, group in _by_request(row, "groups").items() if "groups" in row else ():
            if (pid, RequestId(request)) not in self._terms:
                raise Broken(f"groups names request {request}, of which no line has terms; give the lines from the first on.")
            group = None if group is None else RequestId(whole(group, "a group", MAX_KEY))
            self._terms[pid, RequestId(request)]["group_id"] = group
        requests = tuple([self._request(pid, each, now_s) for each in _list(member(row, "queue"), "queue")])
        known = {name: counts[field] for name, field in VIEW_FIELDS.items()}
        view = StepView(**known, phase=_phase(member(row, "own"), "own"), requests=requests, now_s=now_s)
        phase = member(row, "phase")
        return DecisionLine(policy, view, _decision(row), None if phase is None else _phase(phase, "phase"))

    def _learn(self, pid: Any, row: Any) -> None:
        if type(row) is not list or len(row) not in (4, 4 + len(ServiceLevel._fields)) or type(row[3]) is not str:
            raise Broken(
                f"a row of terms is {shortened(row)}; request, arrival, max_new, adapter, and five of its service or none "
                "were expected."
            )
        request, arrival_s, max_new, adapter, *asked = row
        service = NO_SERVICE
        if asked:
            if type(asked[0]) is not int or type(asked[1]) is not str:
                raise Broken(f"a service of terms is {shortened(asked)}; a priority, a tenant and three times were expected.")
            times = [math.inf if each is None else _number(each, "a time of terms") for each in asked[2:]]
            service = ServiceLevel(asked[0], asked[1], *times)
        number = whole(request, "a request of terms", MAX_KEY)
        arrival_s, max_new = _number(arrival_s, "an arrival of terms"), whole(max_new, "max_new of terms", MAX_KEY)
        self._terms[pid, RequestId(number)] = {
            **dict(zip(TERM_FIELDS, (arrival_s, max_new, adapter), strict=True)), "service": service
        }  # fmt: skip

    def _request(self, pid: Any, value: Any, now_s: float) -> RequestView:
        size = len(QUEUE_FIELDS)
        if type(value) is not list or len(value) not in (size, size + 2) or value[1] not in ("prefill", "decode"):
            raise Broken(
                f"a row of queue is {shortened(value)}; request, prefill or decode, four counts, and two times or none were "
                "expected."
            )
        request, phase, *counts = value[:size]
        known = {name: whole(count, "a count of queue", MAX_KEY) for name, count in zip(QUEUE_FIELDS[2:], counts, strict=True)}
        number = RequestId(whole(request, "a request of queue", MAX_KEY))
        terms = self._terms.get((pid, number))
        if terms is None:
            raise Broken(f"request {number} is in the queue and no line has its terms; give the lines from the first on.")
        times = dict(zip(TIME_FIELDS, [_time(each, now_s) for each in value[size:]], strict=False))
        return RequestView(request_id=number, phase=PHASES[phase], **known, **terms, **times)


def _decision(row: dict[str, Any]) -> ScheduleDecision | None:
    if "choice" in row:
        if row["choice"] != LEFT:
            raise Broken(f"choice is {shortened(row['choice'])}; {LEFT}, or no such field, was expected.")
        return None
    order, budget, wanted = member(row, "order"), member(row, "token_budget"), member(row, "wanted")
    return ScheduleDecision(
        None if order is None else _ids(order, "order"), frozenset(_ids(member(row, "hold"), "hold")),
        None if budget is None else whole(budget, "token_budget"), str(member(row, "reason")),
        None if wanted is None else _phase(wanted, "wanted"),
        {key: whole(tokens, "chunk_tokens") for key, tokens in _by_request(row, "chunk_tokens").items()},
        {key: str(why) for key, why in _by_request(row, "reasons").items()},
        {key: whole(tokens, "draft_tokens") for key, tokens in _by_request(row, "draft_tokens").items()}
        if "draft_tokens" in row else {}, _rules(row.get("collectives", ())),
    )  # fmt: skip


def _rules(rows: Any) -> tuple[CommRule, ...]:
    try:
        return read_rules(rows)
    except (TypeError, ValueError) as error:
        raise Broken(f"collectives: {error}.") from None


def _phase(value: Any, name: str) -> Phase:
    if value not in ("prefill", "decode"):
        raise Broken(f"{name} is {shortened(value)}; prefill or decode was expected.")
    return Phase(value)


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Broken(f"{name} is {shortened(value)}; a finite number of seconds was expected.")
    return value


def _time(value: Any, now_s: float) -> float:
    """The other way round of what `ScheduleLines` writes: whole nanoseconds count back, a number with a point is seconds."""
    if value is None:
        return math.inf
    if type(value) is float:
        return _number(value, "a time of queue")
    if type(value) is not int or abs(value) > MAX_KEY:
        raise Broken(f"a time of queue is {shortened(value)}; nanoseconds, seconds with a point, or null was expected.")
    return (ns_of(now_s) - value) / 1e9


def _list(value: Any, name: str) -> list[Any]:
    if type(value) is not list:
        raise Broken(f"{name} is {shortened(value)}; a list was expected.")
    return value


def _ids(value: Any, name: str) -> list[RequestId]:
    return [RequestId(whole(request, f"a request of {name}", MAX_KEY)) for request in _list(value, name)]


def _by_request(row: dict[str, Any], name: str) -> dict[RequestId, Any]:
    value = member(row, name)
    if type(value) is not dict or not all(key.isascii() and key.isdigit() for key in value):
        raise Broken(f"{name} is {shortened(value)}; an object by request was expected.")
    return {RequestId(int(key)): each for key, each in value.items()}
