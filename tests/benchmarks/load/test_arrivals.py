"""Arrivals repeat with their seed and keep their rate; a bad trace is named to the line."""

import json
import re

import numpy as np
import pytest

from benchmarks.config import Closed, Poisson, Trace
from benchmarks.errors import BenchmarkError
from benchmarks.load.arrivals import TraceRow, read_trace, send_times

ROW = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def trace(tmp_path, *rows, **options):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return Trace(file=file, **options)


def test_answers_set_the_pace_of_a_closed_loop():
    assert send_times(Closed(concurrency=3), 10, 0) is None


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_poisson_keeps_its_rate_and_spread(rate):
    times = send_times(Poisson(rate=rate), 20_000, 7)
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.03)
    assert gaps.std() == pytest.approx(1 / rate, rel=0.05)  # an exponential's is its mean


def test_poisson_repeats_with_its_seed():
    times = [send_times(Poisson(rate=5), 50, seed) for seed in (1, 1, 2)]
    assert (times[0] == times[1]).all()
    assert (times[0][1:] != times[2][1:]).all()
    assert (send_times(Poisson(rate=10), 50, 1) * 2 == times[0]).all()


def test_a_trace_with_speed(tmp_path):
    rows = [ROW | {"timestamp": 3000}, "", ROW | {"timestamp": 3500.5, "model": "other keys are left alone"}, ROW]
    assert send_times(trace(tmp_path, *rows, speed=2), 2, 0).tolist() == [0, 0.25025]
    assert read_trace(trace(tmp_path, *rows), 1) == [TraceRow(3000, 600, 5, (0, 1))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "no JSON"),
        ("[1]", "got [1]; a row must be an object"),
        ({"timestamp": 1}, "input_length is missing; it must be a whole number of tokens from 1"),
        (ROW | {"timestamp": -1}, "timestamp is -1; it must be a number of milliseconds from 0"),
        (ROW | {"timestamp": float("nan")}, "timestamp is nan"),
        (ROW | {"timestamp": "soon"}, "timestamp is 'soon'"),
        (ROW | {"input_length": 0}, "input_length is 0"),
        (ROW | {"input_length": True}, "input_length is True"),
        (ROW | {"output_length": 2.5}, "output_length is 2.5"),
        (ROW | {"hash_ids": 4}, "hash_ids is 4; it must be a list of whole numbers from 0"),
        (ROW | {"hash_ids": [0, -1]}, "hash_ids is [0, -1]"),
        (ROW | {"hash_ids": [0]}, "hash_ids has 1 ids; input_length 600 needs 2, one for each 512 tokens"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    config = trace(tmp_path, ROW, "", row)
    with pytest.raises(BenchmarkError, match=re.escape(f"{config.file}, line 3: {message}")):
        read_trace(config, 2)
    assert len(read_trace(config, 1)) == 1


def test_rows_out_of_order(tmp_path):
    with pytest.raises(BenchmarkError, match="line 2: timestamp 1 comes after 2; rows must be in the order"):
        read_trace(trace(tmp_path, ROW | {"timestamp": 2}, ROW | {"timestamp": 1}), 2)


def test_files_that_cannot_serve(tmp_path):
    with pytest.raises(BenchmarkError, match="has 1 requests; num_requests 2 must not be above that"):
        send_times(trace(tmp_path, ROW), 2, 0)
    with pytest.raises(BenchmarkError, match="cannot read trace .*: No such file"):
        send_times(Trace(file=tmp_path / "none"), 2, 0)
    with pytest.raises(BenchmarkError, match="cannot read trace .*: Is a directory"):
        send_times(Trace(file=tmp_path), 2, 0)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BenchmarkError, match="no UTF-8"):
        send_times(Trace(file=tmp_path / "binary"), 2, 0)
