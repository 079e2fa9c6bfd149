"""A record replays without a difference; one that was changed does not."""

import gzip
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import TraceError
from sagellm.core.events import EventLog
from sagellm.core.hooks import Tier
from sagellm.kv_runtime.quota import QuotaManager
from sagellm.replay.verify import ENGINE_FIELDS, verify_log
from tests.kv_runtime.policies import KeepsEven, make_migration, make_policy
from tests.kv_runtime.workload import Engine, manager_of, requests


def check(path):
    return verify_log(path, make_policy=make_policy, make_migration=make_migration)


def run(record, seed=0, count=40, policy="lru", *, cpu=5, nvme=6, even=False, quotas=None):
    capacities = {Tier.GPU: 7, Tier.CPU: cpu, Tier.NVME: nvme}
    manager = manager_of(
        policy, 7, cpu, nvme, record=record, migration=KeepsEven() if even else None,
        quota=QuotaManager(quotas or {}, capacities),
        origin={"migration": {"name": "even" if even else "always", "options": {}}, "quotas": quotas},
    )  # fmt: skip
    engine = Engine(manager, 1 + seed % 3)
    for request in requests(seed, count):
        engine.serve(*request)
    return engine


@pytest.fixture
def lines(tmp_path):
    """A record, its lines to be changed, and how to write them down again."""
    path = tmp_path / "log.jsonl"
    log = EventLog(path)
    log.write("open", version="x")
    run(log.write)
    log.write("close")
    log.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]

    def write(rows, tail=""):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
        return path

    return rows, write


def place_of(rows, event, number=0, where=lambda row: True):
    return [place for place, row in enumerate(rows) if row["event"] == event and where(row)][number]


def test_a_record_replays_without_a_difference(lines):
    rows, write = lines
    report = check(write(rows))
    assert report.agrees and not report.truncated
    assert report.counts["kv_open"] == 1 and report.counts["kv_lookup"] == 40
    assert report.num_decisions == report.counts["kv_room"] + report.counts["kv_fetch"] > 10
    assert report.num_hits == sum(row["found"] for row in rows if row["event"] == "kv_lookup") > 0
    assert json.loads(json.dumps(report.to_dict()))["agrees"] is True


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6), policy=st.sampled_from(["lru", "fifo", "newest", "lazy"]), even=st.booleans(),
    tiers=st.sampled_from([(0, 0), (5, 0), (5, 6), (0, 6), (6, 4)]), quotas=st.booleans(),
)  # fmt: skip
def test_any_workload_replays_without_a_difference(tmp_path_factory, seed, policy, even, tiers, quotas):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    rows = []
    limits = {"a": {"gpu": 3} | ({"cpu": 0.5} if tiers[0] else {})} if quotas else None
    run(
        lambda event, **fields: rows.append({"event": event, **fields}), seed, 20, policy,
        cpu=tiers[0], nvme=tiers[1], even=even, quotas=limits,
    )  # fmt: skip
    path.write_text("".join(json.dumps({"n": n, "pid": 1, **row}) + "\n" for n, row in enumerate(rows)))
    assert check(path).differences == []


def test_a_changed_victim_is_found(lines):
    rows, write = lines
    place = place_of(rows, "kv_room", 3, lambda row: row["victims"])
    rows[place]["victims"][0][0] = "00000000000000ff"
    report = check(write(rows))
    assert not report.agrees
    assert [(each.line, each.event, each.field) for each in report.differences] == [(place + 1, "kv_room", "victims")]
    assert "00000000000000ff" in str(report.differences[0])


def test_a_changed_reason_is_found(lines):
    rows, write = lines
    place = place_of(rows, "kv_room", 2, lambda row: row["victims"])
    rows[place]["victims"][0][1] = "no reason"
    assert [each.line for each in check(write(rows)).differences] == [place + 1]


def test_a_changed_hit_count_is_found(lines):
    rows, write = lines
    place = place_of(rows, "kv_lookup", 7)
    rows[place]["resident"] += 1
    assert [(each.line, each.field) for each in check(write(rows)).differences] == [(place + 1, "resident")]


@pytest.mark.parametrize("event", ["kv_stored", "kv_released", "kv_dropped", "kv_moved", "kv_lookup"])
def test_a_missing_event_is_found(lines, event):
    rows, write = lines
    place = place_of(rows, event, 1)
    del rows[place]
    report = check(write(rows))
    assert report.gaps == [(place + 1, place, place + 1)]
    assert not report.agrees


def test_a_missing_event_is_found_without_numbers(lines):
    rows, write = lines
    del rows[place_of(rows, "kv_stored", 1)]
    for row in rows:
        del row["n"]
    assert check(write(rows)).differences


def test_two_processes_and_two_runs_in_a_log(lines):
    rows, write = lines
    other = [{**row, "pid": os.getpid() + 1} for row in rows]
    mixed = [row for pair in zip(rows, other, strict=True) for row in pair]
    again = [{**row, "n": row["n"] + len(rows)} for row in rows]
    report = check(write(mixed + again))
    assert report.agrees and report.counts["kv_open"] == 3


def test_a_truncated_last_line_is_left_out(lines):
    rows, write = lines
    report = check(write(rows, '{"t_ns": 5, "n": '))
    assert report.agrees and report.truncated


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{nonsense", "not JSON"),
        ("[1]", "no event"),
        ('{"event": "kv_lookup", "pid": 1}', "before kv_open"),
        ('{"event": "kv_sung"}', "unknown event"),
        (
            '{"event": "kv_lookup", "keys": ["xyz"], "request": 1, "limit": 3, "time_s": 0}',
            "keys is .*16 hexadecimal digits",
        ),
        ('{"event": "kv_lookup", "keys": []}', "'request' is missing"),
        ('{"event": "kv_dropped", "keys": [], "tier": "tape", "time_s": 0, "evicted": true}', "tape"),
        ('{"event": "kv_open", "format": 99, "tiers": [{"headroom": 2}]}', "format 99; this version replays"),
    ],
)
def test_a_malformed_line_is_named(lines, line, why):
    rows, write = lines
    path = write(rows[:30])
    pid = rows[0]["pid"]
    if '"pid"' not in line and line.startswith('{"'):
        line = line[:-1] + f', "pid": {pid}}}'
    with path.open("a") as file:
        file.write(line + "\n" + json.dumps(rows[30]) + "\n")
    with pytest.raises(TraceError, match=f"line 31: .*{why}"):
        check(path)


DAMAGE = {
    "pid": ([7], {"a": 1}, 1.5), "n": ("a", -1, None), "time_s": ([1], None, "5", float("nan"), float("inf"), 10**400),
    "keys": ("abc", [5], ["0x1"], ["zz"], None, [None]),
    "incoming": ([5], {}), "tier": ("tape", None, []), "count": ("x", -1, 1.5),
    "blocks": ([[1]], "ab", [5]), "refused": (5, ["zz"], {"zz": "full"}), "request": ([1], {}), "limit": ("9", None),
    "num_kept": (-1, "1"), "num_resident": ([],), "num_running": (None,), "queued_bytes": ("many",), "evicted": (1, "yes"),
    "src": ("tape",), "dst": (["cpu"],), "victims": (None, "abc", [5]), "found": ("3",), "matched": ("64",),
    "tiers": (None, "abc", [5], [{"tier": "gpu", "capacity": 5, "zz": 1}], [{"tier": "gpu", "capacity": "x"}], []),
    "migration": ("x", {"name": "always"}, {"name": 5, "options": {}}), "quotas": ("x", {"a": 5}, {"a": {"gpu": "x"}}),
    "block_size": (0, "x"), "format": (99, [1], None),
}  # fmt: skip


def test_damaged_fields_are_named(lines):
    """Every field of the record is damaged in turn. The message has line and event, and is not one of Python's own."""
    rows, write = lines
    rows.insert(
        1, {"t_ns": 0, "n": 1, "pid": rows[0]["pid"], "event": "lookup", "request": 1, "matched": 0, "blocks": [4]}
    )
    for row in rows[2:]:
        row["n"] += 1
    rows[place_of(rows, "kv_open")]["block_size"] = 16
    tried = set()
    for name, values in DAMAGE.items():
        for event in dict.fromkeys(
            row["event"] for row in rows if name in row and (row["event"].startswith("kv_") or name in ENGINE_FIELDS)
        ):
            place = place_of(rows, event, where=lambda row, name=name: name in row)
            if name == "tiers" and event != "kv_open":
                continue
            for value in values:
                kept, rows[place][name] = rows[place][name], value
                with pytest.raises(TraceError, match=f"line {place + 1}: {event}: ") as found:
                    check(write(rows[: place + 1]))
                rows[place][name] = kept
                words = ("object", "argument", "literal", "unhashable", "operand", "subscriptable", "iterable")
                assert not any(f"{word} " in str(found.value).split("; ")[0] for word in words), str(found.value)
                tried.add(name)
    assert tried == set(DAMAGE)


def test_brackets_without_end(lines):
    rows, write = lines
    with pytest.raises(TraceError, match="line 31: not JSON"):
        check(write(rows[:30], "[" * 100_000 + "\n"))


def test_the_format_of_the_engine_counts_too(lines):
    rows, write = lines
    rows[0]["format"] = 1
    with pytest.raises(TraceError, match="line 1: open: format 1; this version reads format 2"):
        check(write(rows))


def test_a_record_that_stops_early(lines):
    rows, write = lines
    assert check(write(rows)).num_open == 0
    report = check(write(rows[: len(rows) // 2]))
    assert report.agrees and report.num_open == 1 and report.to_dict()["without_close"] == 1


def test_a_record_in_gzip(lines):
    rows, write = lines
    plain = check(write(rows))
    path = write(rows)
    path.write_bytes(gzip.compress(path.read_bytes()))
    packed = check(path)
    assert packed.agrees and packed.counts == plain.counts


@pytest.mark.parametrize("field", ["found", "resident", "request", "victims", "demote", "drop"])
def test_fields_that_one_side_lacks_are_differences(lines, field):
    rows, write = lines
    place = place_of(rows, "kv_room" if field in ("victims", "demote", "drop") else "kv_lookup", 1)
    rows[place]["odd"] = 5
    assert [(each.line, each.field) for each in check(write(rows)).differences] == [(place + 1, "odd")]
    del rows[place]["odd"]
    if field not in ("found", "request"):  # of those that only the replay writes again
        del rows[place][field]
        assert [(each.line, each.field) for each in check(write(rows)).differences] == [(place + 1, field)]


def test_no_file_and_nothing_in_it(tmp_path):
    with pytest.raises(TraceError, match="cannot read"):
        check(tmp_path / "none")
    (tmp_path / "empty").write_text('{"event": "open", "n": 0, "pid": 1}\n')
    with pytest.raises(TraceError, match="no kv_open"):
        check(tmp_path / "empty")


def test_a_policy_that_decides_otherwise_is_found(lines):
    rows, write = lines
    rows[place_of(rows, "kv_open")]["tiers"][0]["policy"] = "newest"
    report = check(write(rows))
    assert {each.event for each in report.differences} >= {"kv_room"}


def test_a_policy_that_fails_is_a_difference(lines):
    rows, write = lines
    rows[place_of(rows, "kv_open")]["tiers"][0]["policy"] = "raising"
    assert "no idea" in str(check(write(rows)).differences[0])
