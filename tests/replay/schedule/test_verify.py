"""A strategy that is asked again decides as its log says; what was changed in the log is listed."""

import json

import pytest
from click.testing import CliRunner

from sagellm.cli import main
from sagellm.core.answers import check_schedule
from sagellm.core.errors import TraceError
from sagellm.core.events import EventLog
from sagellm.core.hooks import ScheduleDecision, ServiceLevel
from sagellm.core.schedule_lines import ScheduleLines, step_line
from sagellm.replay.schedule.decisions import write_decisions
from sagellm.replay.schedule.verify import FROM_VIEWS, PLUG_IN, verify_schedule
from sagellm.replay.schedule.virtual_run import virtual_run
from sagellm.scheduler_ir.strategies.base import SchedulingStrategy
from sagellm.scheduler_ir.strategies.registry import strategy_names
from sagellm.scheduler_ir.strategy_plugin import StrategyPlugin
from tests.replay.schedule.made import open_fields, request
from tests.scheduler_ir.simulation.made import COSTS, SHAPE

LEVELS = [ServiceLevel(), ServiceLevel(2, "a"), ServiceLevel(0, "b", 30.0, 2.0, 0.9), ServiceLevel(tpot_s=0.7)]
REQUESTS = [request(number, number / 3, 20 + 37 * (number % 4), 6, service=LEVELS[number % 4]) for number in range(14)]
SHAPE_OF_LOG = open_fields()
LEAVES, TELLS, RAISES = (f"tests.replay.schedule.test_verify:{name}" for name in ("Leaves", "Tells", "Raises"))


class Leaves(SchedulingStrategy):
    """All to the engine."""

    name = "leaves"

    def decide(self, view):
        return None


class Tells(SchedulingStrategy):
    """Gives everything that it was told as the reason of its decision."""

    name = "tells"

    def __init__(self):
        self.told = []

    def decide(self, view):
        told, self.told = self.told, []
        return ScheduleDecision(reason=f"{view} {told}")

    def on_step_end(self, result):
        self.told.append(result)

    def on_request_end(self, request_id):
        self.told.append(request_id)


class Raises(SchedulingStrategy):
    name = "raises"

    def decide(self, view):
        return 1 / 0


class Recorded(SchedulingStrategy):
    """A strategy as a plug-in of an engine, with its record."""

    def __init__(self, log, name, options):
        self.plugin, self.log, self.lines = StrategyPlugin(name, options), log, ScheduleLines()

    def decide(self, view):
        decision = check_schedule(self.plugin.schedule(view), view)
        self.log.write("schedule", **self.lines.fields(PLUG_IN, view, decision, view.phase))
        return decision

    def on_step_end(self, result):
        self.log.write("step", **step_line(result))
        self.plugin.on_step_end(result)

    def on_request_end(self, request_id):
        self.log.write("end", request=request_id, generated=6, reason="length")
        self.plugin.on_request_end(request_id)
        self.lines.forget([request_id])


def record(path, name, options=None, opened=None):
    """Rows of the log of a run on the virtual clock."""
    log = EventLog(path)
    spec = {"name": PLUG_IN, "options": {"strategy": name, "options": options or {}}}
    log.write(**(SHAPE_OF_LOG | {"plugins": [spec]} | (opened or {})))
    virtual_run(REQUESTS, SHAPE, COSTS, Recorded(log, name, options))
    log.write("close")
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.jsonl"


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def place_of(rows, event, number=0, where=lambda row: True):
    return [place for place, row in enumerate(rows) if row["event"] == event and where(row)][number]


@pytest.mark.parametrize("name", [*strategy_names(), LEAVES, TELLS])
def test_nothing_differs(path, name):
    rows = record(path, name, {"batch_size": 3} if name == "aegaeon" else {})
    found = verify_schedule(path)
    assert found.agrees and found.strategies == (name,) and not found.num_open
    told = [sum(row["event"] == event for row in rows) for event in ("schedule", "step", "end")]
    assert [found.num_decisions, found.num_steps, found.num_ends] == told and min(told) >= 14
    assert found.num_left == (found.num_decisions if name == LEAVES else 0)
    if name in ("adaptive", "hybrid"):
        assert any(row.get("chunk_tokens") for row in rows), "no prompt was cut"


@pytest.mark.parametrize(
    "field, change",
    [
        ("order", lambda row: row["order"].reverse()), ("hold", lambda row: row["hold"].append(row["order"][0])),
        ("reason", lambda row: row.update(reason="no reason")), ("wanted", lambda row: row.update(wanted="decode")),
        ("token_budget", lambda row: row.update(token_budget=7)),
        ("chunk_tokens", lambda row: row["chunk_tokens"].update({"0": 7})),
        ("reasons", lambda row: row["reasons"].update({"0": "why"})), ("choice", lambda row: row.update(choice="engine")),
    ],
)  # fmt: skip
def test_a_changed_choice_is_listed(path, field, change):
    rows = record(path, "fifo")
    place = place_of(rows, "schedule", 3, lambda row: len(row["order"]) > 1)
    change(rows[place])
    (only,) = verify_schedule(written(path, rows)).differences
    assert (only.line, only.event, only.field) == (place + 1, "schedule", field)


def first_row(row, name, place, value):
    row[name][0][place] = value


@pytest.mark.parametrize(
    "event, change",
    [
        ("step", None), ("end", None), ("step", lambda row: row.update(seconds=9.0)),
        ("step", lambda row: row.update(end_s=row["end_s"] + 1e-9)), ("step", lambda row: row.update(swap_seconds=1)),
        ("step", lambda row: row.update(context=row["context"] + 1)), ("step", lambda row: row.update(bytes_in=1)),
        ("step", lambda row: row.update(bytes_out=1)), ("step", lambda row: row.update(refused={"0": "no"})),
        ("step", lambda row: row.update(step=99)), ("step", lambda row: first_row(row, "computed", 1, 90)),
        ("end", lambda row: row.update(request=99)), ("schedule", lambda row: row.update(now_s=99.0)),
        ("schedule", lambda row: row.update(own="decode")), ("schedule", lambda row: row.update(in_flight=9)),
        ("schedule", lambda row: row.update(free_blocks=9)), ("schedule", lambda row: row.update(limit=9)),
        ("schedule", lambda row: first_row(row, "queue", 5, 9)), ("schedule", lambda row: first_row(row, "terms", 1, 9.0)),
        ("schedule", lambda row: first_row(row, "terms", 6, 9.5)), ("schedule", lambda row: first_row(row, "terms", 5, "z")),
    ],
)  # fmt: skip
def test_what_it_was_told_matters(path, event, change):
    """A changed line, or none there."""
    rows = record(path, TELLS)
    place = place_of(rows, event, 1, lambda row: event != "schedule" or len(row.get("terms", [[]])[0]) > 4)
    if change is None:
        del rows[place]
        assert verify_schedule(written(path, rows)).gaps == [(place + 1, place, place + 1)]
        for row in rows:
            del row["n"]
    else:
        change(rows[place])
    assert verify_schedule(written(path, rows)).differences


def test_an_end_and_a_second_process(path):
    """One log of two runs; of the second the end is missing, and its last line is cut off."""
    rows = record(path, "fifo")
    again = [{**row, "pid": 1} for row in record(path.with_name("other"), "fair")][:-1]
    written(path, [*rows, *again])
    path.write_text(path.read_text()[:-9])
    found = verify_schedule(path)
    assert found.agrees and found.num_open == 1 and found.truncated and found.strategies == ("fifo", "fair")


def test_command(path):
    rows = record(path, "hybrid", {"max_overhead": 0.5})
    done = run(path)
    assert done.exit_code == 0 and f"{path}: {num_of(rows)} decisions of hybrid, 0 left to the engine" in done.output
    assert "0 differences, 0 gaps." in done.output
    rows[place_of(rows, "schedule", 2)]["reason"] = "changed"
    written(path, rows)
    done = run(path)
    assert done.exit_code == 1 and "schedule, reason: recorded 'changed', replayed " in done.output
    done = run(path, "--json", "--strategy", "hybrid", "--strategy-options", '{"max_overhead": 0.5}')
    found = json.loads(done.output)
    assert done.exit_code == 1 and not found["agrees"] and [each["field"] for each in found["differences"]] == ["reason"]
    done = run(path, "--strategy", TELLS)
    assert done.exit_code == 1 and "more; --json lists them" in done.output
    assert run(path, "--strategy", RAISES).output.count("ZeroDivisionError: ") == 20


def run(path, *arguments):
    return CliRunner().invoke(main, ["replay", "--schedule", str(path), "--verify", *arguments])


def num_of(rows):
    return sum(row["event"] == "schedule" for row in rows)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--strategy", "fifo,fair"), "name one"), (("--strategy", "engine"), "name one"),
        (("--strategy", "nobody"), "known are"),
        (("--strategy-options", "{}"), "goes with --strategy"), (("--speedup", "2"), "--speedup has no meaning with"),
        (("--skip-bad",), "--skip-bad has no meaning with --schedule --verify"), (("some.jsonl",), "give either"),
    ],
)  # fmt: skip
def test_misuse(path, arguments, words):
    record(path, "fifo")
    done = run(path, *arguments)
    assert done.exit_code == 2 and words in done.output, done.output
    assert CliRunner().invoke(main, ["replay", "--verify"]).exit_code == 2


@pytest.mark.parametrize(
    "opened, changed, words",
    [
        (dict(plugins=[]), {}, "decided, which is no strategy of this log's open line alone; name a strategy"),
        (dict(format=1), {}, "line 1: open: the log has format 1"), (dict(plugins=3), {}, "plugins is 3"),
        ({}, dict(policy=FROM_VIEWS), "tells no steps and no ends"), ({}, dict(queue=3), "line 2: schedule: queue is 3"),
        ({}, dict(event="step"), "it has no end_s; record the run with this version"),
        ({}, dict(event="open"), "open: the log has format None"),
    ],
)  # fmt: skip
def test_logs_that_cannot_be_used(path, opened, changed, words):
    rows = record(path, "fifo", opened=opened)
    rows[1] = {**rows[1], **changed, **({"phase": None} if "event" in changed else {})}
    with pytest.raises(TraceError) as caught:
        verify_schedule(written(path, rows))
    assert words in str(caught.value)


def test_decisions_alone_are_not_enough(path):
    """A file of --decisions does not say what the strategy was told between."""
    decisions = []
    virtual_run(REQUESTS, SHAPE, COSTS, Leaves(), decisions=decisions)
    write_decisions(path, decisions)
    with pytest.raises(TraceError, match="before any open line"):
        verify_schedule(path)
    written(path, [open_fields()])
    with pytest.raises(TraceError, match="no schedule line"):
        verify_schedule(path)
