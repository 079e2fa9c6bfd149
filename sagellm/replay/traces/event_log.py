"""The event log of our own engine as a trace: the requests that it looked up, in that order, with their block hashes.

Each request's first `lookup` line gives time, prompt length and hashes of its full blocks; an `end` line, where there is one,
the length of the answer, an `arrive` line the tenant. Lookups after a preemption are left out: whether there are any is for
the replay to say.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from sagellm.core.errors import TraceError
from sagellm.replay.base import MAX_KEY, MAX_TOKENS, Trace, shortened
from sagellm.replay.traces.json_lines import member, parse_object
from sagellm.replay.traces.lines import BadLines, Broken, TextFile
from sagellm.replay.traces.rows import Rows, size_of_most, whole

NS = 1e-9
HASH_DIGITS = 16
WANTED = (b'"lookup"', b'"arrive"', b'"end"', b'"block_size"')
OWN_LINE = re.compile(rb'\{"t_ns": ?\d+, ?"n": ?\d+, ?"pid": ?\d+, ?"event": ?"\w+"')
HASH = re.compile("[0-9a-fA-F]{1,16}")
Request = tuple[Any, Any]  # process, id


@dataclass
class _Lookup:
    line: int
    t_ns: int
    tokens: int
    keys: list[int]
    tenant: str
    generated: int = 0


def read_event_log(file: TextFile, bad: BadLines, *, block_size: int | None, unique_parents: bool) -> Trace:
    """Args: `block_size`: None to take it from the log.

    Raises:
        TraceError: a malformed line, unless `bad` skips it, or no request was looked up.
    """
    lookups: list[_Lookup] = []
    running: dict[Request, _Lookup] = {}
    tenants: dict[Request, str] = {}
    told_size: int | None = None
    for number, event in file.parse(_parse, bad):
        try:
            told_size = _take(event, number, lookups, running, tenants) or told_size
        except Broken as error:
            bad.add(number, str(error))
    if not lookups:
        raise bad.nothing_left()
    size = block_size or told_size or _size(lookups)
    if size is None:
        raise TraceError(f"{Path(file.name).name}: no line says how many tokens a block has; give --block-size.")
    rows = Rows(bad)
    start_ns = min(lookup.t_ns for lookup in lookups)
    for lookup in lookups:
        if lookup.tokens // size != len(lookup.keys):
            expected = lookup.tokens // size
            bad.add(
                lookup.line, f"{len(lookup.keys)} hashes for {lookup.tokens} tokens; blocks of {size} make {expected}."
            )
            continue
        time_s = (lookup.t_ns - start_ns) * NS
        rows.add(lookup.line, time_s, lookup.tokens, lookup.generated, lookup.keys, lookup.tenant)
    if unique_parents:
        rows.leave_out_overlaps()
    return rows.trace(file, size)


def _parse(line: bytes) -> dict[str, Any]:
    # Most lines of a log are about something else, and parsing is what reading costs. Those that our engine writes begin so.
    if OWN_LINE.match(line) and line.rstrip().endswith(b"}") and not any(word in line for word in WANTED):
        return {"event": ""}
    event = parse_object(line)
    kind = member(event, "event")
    if type(kind) is not str:
        raise Broken(f"event is {shortened(kind)}; a string was expected.")
    return event


def _take(
    event: dict[str, Any],
    line: int,
    lookups: list[_Lookup],
    running: dict[Request, _Lookup],
    tenants: dict[Request, str],
) -> int | None:
    """Enter one event; returns the block size if it tells one. Raises Broken."""
    kind = event["event"]
    if kind == "lookup" and event.get("first", True):
        request = _request(event)
        lookup = _Lookup(
            line, whole(member(event, "t_ns"), "t_ns", MAX_KEY), whole(member(event, "tokens"), "tokens"),
            _hashes(member(event, "hashes")), tenants.pop(request, ""),
        )  # fmt: skip
        running[request] = lookup
        lookups.append(lookup)
    elif kind == "arrive" and event.get("tenant"):
        tenants[_request(event)] = str(event["tenant"])
    elif kind == "end" and "generated" in event:
        ended = running.pop(_request(event), None)
        if ended is not None:
            ended.generated = whole(event["generated"], "generated")
    elif kind == "open" and type(event.get("block_size")) is int and event["block_size"] > 0:
        return event["block_size"]
    return None


def _request(event: dict[str, Any]) -> Request:
    name = member(event, "request")
    if type(name) not in (int, str):
        raise Broken(f"request is {shortened(name)}; a number was expected.")
    process = event.get("pid")
    if type(process) not in (int, str, NoneType):
        raise Broken(f"pid is {shortened(process)}; a number was expected.")
    return process, name


def _hashes(values: Any) -> list[int]:
    if type(values) is not list or not set(map(type, values)) <= {str}:
        raise Broken("hashes must be a list of strings.")
    if not all(map(HASH.fullmatch, values)):
        raise Broken(f"hashes must be strings of {HASH_DIGITS} hexadecimal digits.")
    return [int(value, 16) for value in values]


def _size(lookups: list[_Lookup]) -> int | None:
    lengths = np.array([lookup.tokens for lookup in lookups], np.int64)
    counts = np.array([len(lookup.keys) for lookup in lookups], np.int64)
    # A request of L tokens with k full blocks fits sizes with k * size <= L < (k + 1) * size.
    highest = np.where(counts > 0, lengths // np.maximum(counts, 1), MAX_TOKENS)
    return size_of_most(np.maximum(lengths // (counts + 1) + 1, 1), highest)
