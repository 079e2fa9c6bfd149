"""Tests of the event log: its lines stay whole and its counters have no gaps, whichever thread or process writes."""

import gc
import json
import subprocess
import sys
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sagellm.core.errors import ConfigError
from sagellm.core.events import EventLog, NullRecorder, open_recorder

WRITER = """
import sys, threading
from pathlib import Path
from sagellm.core.events import EventLog
log = EventLog(Path(sys.argv[1]))
def work(name):
    for index in range(300):
        log.write("tick", name=name, index=index, pad="x" * (index % 200))
threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""  # it does not close the log: leaving the process must be enough


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_threads_and_processes(tmp_path):
    path = tmp_path / "events.jsonl"
    processes = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    by_process = defaultdict(list)
    for line in read(path):
        by_process[line["pid"]].append(line)
    assert set(by_process) == {process.pid for process in processes}
    for lines in by_process.values():
        assert sorted(line["n"] for line in lines) == list(range(1200))
        assert {(line["name"], line["index"]) for line in lines} == {(n, i) for n in range(4) for i in range(300)}


def test_fields_of_numpy_and_sets(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("evict", victims=np.array([3, 1]), count=np.int64(2), hold=frozenset([9, 4]), path=tmp_path, share=0.5)
    log.close()
    log.close()
    (line,) = read(tmp_path / "events.jsonl")
    assert (line["victims"], line["count"], line["hold"]) == ([3, 1], 2, [4, 9])
    assert (line["path"], line["share"], line["n"]) == (str(tmp_path), 0.5, 0)
    assert line["t_ns"] > 0


def test_two_logs_append_to_one_file(tmp_path):
    path = tmp_path / "events.jsonl"
    for _ in range(2):
        log = EventLog(path)
        log.write("start")
        log.close()
    assert [line["n"] for line in read(path)] == [0, 0]


def test_writing_does_not_wait_for_the_file(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(log.write, ["tick"] * 8))
    log.close()
    assert sorted(line["n"] for line in read(tmp_path / "events.jsonl")) == list(range(8))


@pytest.mark.parametrize("name", [".", "missing/events.jsonl"])
def test_a_path_that_cannot_be_written(tmp_path, name):
    with pytest.raises(ConfigError, match=r"cannot write the event log .*: \w+"):
        EventLog(tmp_path / name)


def test_a_full_disk_stops_the_record_and_nothing_else(caplog):
    from pathlib import Path

    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    log = EventLog(Path("/dev/full"))
    log.write("tick")
    log.close()
    log.write("tick")
    assert not log.enabled
    assert "event log /dev/full: No space left on device" in caplog.text


def test_no_path_records_nothing():
    recorder = open_recorder(None)
    assert isinstance(recorder, NullRecorder) and not recorder.enabled
    recorder.write("anything", at="all")
    recorder.close()


def test_fields_cannot_be_the_head_nor_leave_a_gap(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("first", n=77, pid="mine", t_ns=0, value=1)
    with pytest.raises(ValueError):
        circle = []
        circle.append(circle)
        log.write("circle", value=circle)
    log.write("second")
    log.close()
    first, second = read(tmp_path / "events.jsonl")
    assert (first["n"], first["event"], first["value"], second["n"]) == (0, "first", 1, 1)
    assert first["t_ns"] > 0 and first["pid"] == second["pid"] != "mine"
    assert list(second) == ["t_ns", "n", "pid", "event"]


def test_a_closed_log_keeps_nothing(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.write("one")
    log.close()
    log.write("two")
    assert not log.enabled and not log._lines
    assert [line["event"] for line in read(tmp_path / "events.jsonl")] == ["one"]
    left = weakref.ref(log)
    del log
    gc.collect()
    assert left() is None
