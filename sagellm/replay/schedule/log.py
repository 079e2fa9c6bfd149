"""Reads the event log of an engine for a replay of its schedule: arrivals, steps, and when each request got its tokens."""

import re
from pathlib import Path
from statistics import median
from typing import Any

from sagellm.core.errors import TraceError
from sagellm.core.events import FORMAT
from sagellm.replay.base import MAX_KEY, shortened
from sagellm.replay.schedule.base import ENGINE, RecordedRequest, RecordedRun, RequestTimes, Run
from sagellm.replay.schedule.follow import Follower
from sagellm.replay.schedule.service import service_of
from sagellm.replay.traces.json_lines import member, parse_object
from sagellm.replay.traces.lines import BadLines, Broken, TextFile, open_text
from sagellm.replay.traces.rows import seconds, whole
from sagellm.scheduler_ir.simulation.base import EngineShape, StepRun

__all__ = ["computed_rows", "plugins_of", "read_log"]

NS = 1e-9
WANTED = ("open", "arrive", "lookup", "schedule", "step", "preempt", "evict", "end")
# As our engine begins its lines: those about other things are not parsed, which is what reading costs.
OWN_LINE = re.compile(rb'\{"t_ns": ?\d+, ?"n": ?\d+, ?"pid": ?\d+, ?"event": ?"(\w+)"')
ORIGIN = "Record a run with --record and give its log from the beginning."


def read_log(path: Path, *, skip_bad: bool = False, follower: Follower | None = None) -> RecordedRun:
    """Raises TraceError: an unreadable file, a malformed line (unless skipped), no engine or several, or no requests."""
    file = open_text(path)
    bad = BadLines(file.name, skip_bad)
    reader = _Reader(Follower() if follower is None else follower)
    for number, line in file.parse(_parse, bad):
        if line is None:
            continue
        try:
            reader.take(line)
        except Broken as error:
            bad.add(number, str(error))
    return reader.run(file, bad)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Raises Broken."""
    own = OWN_LINE.match(line)
    if own and own[1].decode() not in WANTED and line.rstrip().endswith(b"}"):
        return None
    event = parse_object(line)
    kind = member(event, "event")
    if type(kind) is not str:
        raise Broken(f"event is {shortened(kind)}; a string was expected.")
    return event if kind in WANTED else None


class _Reader:
    def __init__(self, follower: Follower) -> None:
        self._shape: EngineShape | None = None
        self._plugins: tuple[dict, ...] = ()
        self._pid: Any = None
        self._decided_by = ENGINE
        self._start_ns: int | None = None
        self._last_ns = 0
        self._follower = follower
        self._num_sent: dict[int, int] = {}  # step -> decode steps of that number

    def take(self, line: dict[str, Any]) -> None:
        """Raises Broken."""
        kind = line["event"]
        t_ns = whole(member(line, "t_ns"), "t_ns", MAX_KEY)
        if t_ns < self._last_ns:
            raise Broken(f"t_ns falls from {self._last_ns} to {t_ns}; lines come in the order in which they were written.")
        if kind == "open":
            self._open(line)
        elif self._shape is None:
            raise Broken(f"{kind} comes before any open line, which says what engine it was. {ORIGIN}")
        elif line.get("pid") != self._pid:
            raise Broken(f"pid is {shortened(line.get('pid'))}; the engine of this log is {shortened(self._pid)}.")
        self._last_ns = t_ns
        if kind == "arrive" and self._start_ns is None:
            self._start_ns = t_ns
        time_s = (t_ns - self._start_ns) * NS if self._start_ns is not None else 0.0
        if kind != "open":
            getattr(self, f"_{kind}")(line, time_s)

    def _open(self, line: dict[str, Any]) -> None:
        if self._shape is not None:
            raise Broken("a second engine opens; give the log of one engine, recorded to a file of its own.")
        plugins = plugins_of(line)
        sizes = {
            name: whole(member(line, key), key)
            for name, key in (
                ("block_size", "block_size"), ("num_blocks", "num_blocks"),
                ("max_prefill_tokens", "max_prefill_tokens"), ("max_batch_size", "max_batch_size"),
            )
        }  # fmt: skip
        sizes["decode_round"] = whole(line.get("decode_round", 1), "decode_round")
        if zeros := [name for name, value in sizes.items() if value == 0]:
            raise Broken(f"{zeros[0]} is 0; it must be 1 or more.")
        self._shape = EngineShape(**sizes, prefix_caching=line.get("prefix_caching") is True)
        self._plugins, self._pid = tuple(plugins), line.get("pid")

    def _arrive(self, line: dict[str, Any], time_s: float) -> None:
        tenant = line.get("tenant", "")
        if type(tenant) is not str:
            raise Broken(f"tenant is {shortened(tenant)}; a string was expected.")
        tokens = whole(member(line, "tokens"), "tokens")
        if tokens < 1:
            raise Broken("tokens is 0; a prompt has at least 1.")
        max_new = whole(line.get("max_new", 0), "max_new")
        service = service_of(line.get("service"), tenant, time_s)
        self._follower.arrive(_request(line), time_s, tokens, max_new, service)

    def _lookup(self, line: dict[str, Any], time_s: float) -> None:
        matched, tokens = (whole(member(line, name), name) for name in ("matched", "tokens"))
        self._follower.lookup(_request(line), matched, tokens)

    def _preempt(self, line: dict[str, Any], time_s: float) -> None:
        self._follower.preempt(_request(line), whole(member(line, "tokens"), "tokens"))

    def _evict(self, line: dict[str, Any], time_s: float) -> None:
        if line.get("request") is not None:  # it lost all that it held; other lines are about prefixes without a request
            self._follower.lose(_request(line))

    def _end(self, line: dict[str, Any], time_s: float) -> None:
        self._follower.end(_request(line), whole(member(line, "generated"), "generated"))

    def _schedule(self, line: dict[str, Any], time_s: float) -> None:
        policy = member(line, "policy")
        if type(policy) is not str:
            raise Broken(f"policy is {shortened(policy)}; a string was expected.")
        self._decided_by = policy

    def _step(self, line: dict[str, Any], time_s: float) -> None:
        phase = member(line, "phase")
        if phase not in ("prefill", "decode"):
            raise Broken(f"phase is {shortened(phase)}; prefill or decode was expected.")
        number, requests, tokens, context = (
            whole(member(line, name), name, MAX_KEY) for name in ("step", "requests", "tokens", "context")
        )
        duration_s = seconds(member(line, "seconds"), "seconds", 1.0)
        if phase == "decode":
            self._num_sent[number] = self._num_sent.get(number, 0) + 1
        rows = computed_rows(line["computed"]) if "computed" in line else None
        self._follower.step(number, phase, time_s, duration_s, requests, tokens, context, rows)

    def run(self, file: TextFile, bad: BadLines) -> RecordedRun:
        """Raises TraceError: the lines make no run."""
        if self._shape is None:
            raise TraceError(f"{file.name} has no open line, which says what engine it was. {ORIGIN}")
        known = self._follower.known.values()
        told = sorted((each for each in known if each.is_complete), key=lambda each: (each.arrival_s, each.number))
        if not told:
            raise bad.nothing_left()
        steps = tuple(self._follower.steps)
        if not steps:
            raise TraceError(f"{file.name} has no step lines, so nothing says how long a step takes. {ORIGIN}")
        shape = self._shape
        if (sent := max(self._num_sent.values(), default=1)) > shape.decode_round:  # what `open` does not say, its steps do
            shape = EngineShape(
                shape.block_size, shape.num_blocks, shape.max_prefill_tokens, shape.max_batch_size, sent, shape.prefix_caching
            )
        for each in told:
            if shape.blocks_of(each.prompt_tokens + each.num_generated) > shape.num_blocks:
                raise TraceError(
                    f"{file.name}: request {each.number} has {each.prompt_tokens + each.num_generated} tokens, the pool "
                    f"room for {shape.num_blocks * shape.block_size}; the lines are not of one engine."
                )
        requests = tuple(
            RecordedRequest(
                each.number, each.arrival_s, each.prompt_tokens, each.num_generated, each.cached_tokens, each.service,
                each.max_new,
            )
            for each in told
        )  # fmt: skip
        times = tuple(
            RequestTimes(
                each.number, each.arrival_s, each.num_generated, each.first_s, each.last_s, tuple(each.token_s), each.service
            )
            for each in told
        )
        return RecordedRun(
            file.name, shape, requests, Run("log", times, steps, self._follower.num_preempted), _gap_s(steps, times),
            len(known) - len(told), bad.count, self._decided_by, self._plugins,
        )  # fmt: skip


def _gap_s(steps: tuple[StepRun, ...], times: tuple[RequestTimes, ...]) -> float:
    """Median of the times between two steps in which somebody waited and the second had not been sent yet."""
    gaps, last_s, arrived, ended = [], None, 0, 0
    arrivals = sorted(each.arrival_s for each in times)
    ends = sorted(each.last_token_s for each in times)
    for step in steps:
        start_s = step.end_s - step.seconds
        if last_s is not None:
            while arrived < len(arrivals) and arrivals[arrived] <= last_s:
                arrived += 1
            while ended < len(ends) and ends[ended] <= last_s:
                ended += 1
            # The seconds of a step that was sent before count from the end of the one before it: the rest is rounding.
            if arrived > ended and start_s - last_s > 2e-5:
                gaps.append(start_s - last_s)
        last_s = step.end_s
    return median(gaps) if gaps else 0.0


def plugins_of(line: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the plug-ins that an `open` line names. Raises Broken: another format, or no list of objects."""
    if line.get("format") != FORMAT:
        raise Broken(f"the log has format {shortened(line.get('format'))}; this version reads {FORMAT}.")
    plugins = line.get("plugins", [])
    if type(plugins) is not list or not all(type(spec) is dict for spec in plugins):
        raise Broken(f"plugins is {shortened(plugins)}; a list of objects was expected.")
    return plugins


def computed_rows(value: Any) -> tuple[tuple[int, int], ...]:
    """The `computed` of a `step` line: (request, new tokens) of each. Raises Broken."""
    if type(value) is not list or not all(type(row) is list and len(row) == 2 for row in value):
        raise Broken(f"computed is {shortened(value)}; a list of pairs of request and new tokens was expected.")
    for request, tokens in value:
        whole(request, "a request of computed", MAX_KEY)
        whole(tokens, "tokens of computed")
    return tuple((request, tokens) for request, tokens in value)


def _request(line: dict[str, Any]) -> int:
    return whole(member(line, "request"), "request", MAX_KEY)
