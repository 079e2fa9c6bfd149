"""Event logs of the engine as traces."""

import json

import pytest

from sagellm.core.errors import TraceError
from sagellm.core.events import EventLog
from sagellm.replay.traces import read_trace


def hashes(*numbers):
    return [f"{number:016x}" for number in numbers]


def lookup(t_ns, request, tokens, keys, **fields):
    return {"t_ns": t_ns, "n": 0, "pid": 7, "event": "lookup", "request": request, "tokens": tokens, "matched": 0,
            "first": True, "hashes": hashes(*keys), **fields}  # fmt: skip


def written(tmp_path, events):
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


EVENTS = [
    {"t_ns": 10, "n": 0, "pid": 7, "event": "arrive", "request": 1, "tokens": 130, "tenant": "red"},
    lookup(1_000_000_000, 1, 130, [11, 12]),
    lookup(1_500_000_000, 2, 200, [11, 13, 2**64 - 1]),
    lookup(1_600_000_000, 1, 133, [11, 12], first=False),
    {"t_ns": 20, "n": 5, "pid": 7, "event": "end", "request": 2, "generated": 9},
    {"t_ns": 21, "n": 6, "pid": 7, "event": "end", "request": 1},
    lookup(2_000_000_000, 2, 63, []),
    {"t_ns": 22, "n": 7, "pid": 8, "event": "end", "request": 2, "generated": 77},
    {"t_ns": 23, "n": 8, "pid": 7, "event": "end", "request": 2, "generated": 5},
]


def test_first_lookups_are_the_requests(tmp_path):
    trace = read_trace(written(tmp_path, EVENTS))
    assert trace.block_size == 64 and trace.lines.tolist() == [2, 3, 7]
    assert trace.times_s.tolist() == [0.0, 0.5, 1.0]
    assert trace.input_tokens.tolist() == [130, 200, 63]
    assert trace.output_tokens.tolist() == [0, 9, 5]  # an end of another process, or without a count, says nothing
    assert trace.keys.tolist() == [11, 12, 11, 13, 2**64 - 1] and trace.offsets.tolist() == [0, 2, 5, 5]
    assert trace.key_tokens().tolist() == [64] * 5
    assert trace.tenants == ("red", "", "")


def test_the_log_may_say_its_block_size(tmp_path):
    events = [{"t_ns": 0, "n": 0, "pid": 7, "event": "open", "block_size": 32}, lookup(5, 1, 32, [4])]
    assert read_trace(written(tmp_path, events)).block_size == 32


def test_what_our_recorder_writes_can_be_read(tmp_path):
    log = EventLog(tmp_path / "log.jsonl")
    log.write("arrive", request=1, tokens=130)
    log.write("lookup", request=1, tokens=130, matched=0, first=True, hashes=hashes(1, 2))
    log.close()
    assert read_trace(tmp_path / "log.jsonl").keys.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": "many"}, "tokens is 'many'; an integer"),
        ({"tokens": -1}, "it must be 0 to"),
        ({"hashes": ["xyz", "0"]}, "16 hexadecimal digits"),
        ({"hashes": ["1" * 17, "0"]}, "16 hexadecimal digits"),
        ({"hashes": ["0x1", "1_0"]}, "16 hexadecimal digits"),
        ({"event": 5}, "event is 5; a string"),
        ({"pid": [7]}, r"pid is \[7\]"),
        ({"hashes": [1, 2]}, "a list of strings"),
        ({"hashes": hashes(1)}, "1 hashes for 130 tokens; blocks of 64 make 2"),
        ({"t_ns": None}, "t_ns is None"),
        ({"t_ns": 1}, "the timestamp falls"),
        ({"request": [1]}, r"request is \[1\]"),
    ],
)
def test_malformed_lookups(tmp_path, changes, words):
    first = [lookup(5, number, 192, [1, 2, 3]) for number in range(3)]
    path = written(tmp_path, [*first, {**lookup(9, 4, 130, [1, 2]), **changes}, lookup(10, 5, 130, [1, 2])])
    with pytest.raises(TraceError, match=rf"line 4: .*{words}"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert trace.num_skipped == 1 and trace.lines.tolist() == [1, 2, 3, 5]


def test_hashes_that_collide(tmp_path):
    path = written(tmp_path, [lookup(5, 1, 130, [1, 2]), lookup(6, 2, 130, [3, 2])])
    with pytest.raises(TraceError, match="line 2: overlapping ids: block 2"):
        read_trace(path)
    assert read_trace(path, unique_parents=False).num_requests == 2


def test_a_log_of_a_killed_engine(tmp_path):
    path = written(tmp_path, EVENTS)
    path.write_text(path.read_text()[:-9])
    with pytest.raises(TraceError, match="line 9: the file ends in the middle of the line"):
        read_trace(path)
    assert read_trace(path, skip_bad=True).num_requests == 3


def test_a_log_without_lookups(tmp_path):
    with pytest.raises(TraceError, match="holds no requests"):
        read_trace(written(tmp_path, EVENTS[:1]))


@pytest.mark.parametrize("rubble", ["}", "matched}", '{"t_ns": 5} {"n": 1}', '{"t_ns": 5, "n": 1, "pid": 7}'])
def test_lines_of_no_interest_are_looked_at_too(tmp_path, rubble):
    path = written(tmp_path, EVENTS)
    path.write_text(path.read_text() + rubble + "\n")
    with pytest.raises(TraceError, match="line 10: "):
        read_trace(path)
