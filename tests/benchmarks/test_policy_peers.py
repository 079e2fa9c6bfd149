"""The comparison of policies says what agrees and what does not, with a stand-in for libCacheSim."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import policy_peers
from benchmarks.policies.report import markdown
from benchmarks.policies.workload import sessions, zipf
from benchmarks.policy_peers import main

SMALL = "--requests 3000 --objects 300 --compared 1500 --single 500 --growing 2000 --rounds 2".split()
STAND_IN = '''
"""Has the names of libCacheSim. All of its policies are FIFO, but LRU, which is right."""
from collections import OrderedDict
from enum import Enum

TraceType = Enum("TraceType", "ORACLE_GENERAL_TRACE")


class Request:
    obj_id = obj_size = 0


class TraceReader:
    def __init__(self, path, kind):
        import numpy as np
        self.ids = np.fromfile(path, "u4, u8, u4, i8")["f1"].tolist()

    def reset(self):
        pass


class FIFO:
    def __init__(self, capacity, hashpower):
        self.capacity, self.cache = capacity, OrderedDict()

    def get(self, request):
        hit = request.obj_id in self.cache
        if hit:
            self.hit(request.obj_id)
        else:
            if len(self.cache) == self.capacity:
                self.cache.popitem(last=False)
            self.cache[request.obj_id] = None
        return hit

    def hit(self, key):
        pass

    def process_trace(self, reader):
        request = Request()
        for request.obj_id in reader.ids:
            self.get(request)


class LRU(FIFO):
    def hit(self, key):
        self.cache.move_to_end(key)


LFU = ARC = Sieve = S3FIFO = TwoQ = GDSF = FIFO
'''


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "environment"
    (folder / "libcachesim-0.3.5.dist-info").mkdir(parents=True)
    (folder / "libcachesim-0.3.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: libcachesim\nVersion: 0.3.5\n"
    )
    (folder / "libcachesim.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return sys.executable


def write_trace(path: Path, rows: list[list[int]]) -> None:
    path.write_text("".join(
        json.dumps({"timestamp": 0, "input_length": 4 * len(row), "output_length": 1, "hash_ids": row}) + "\n" for row in rows
    ))  # fmt: skip


def run(*options: str) -> tuple[int, Any, str]:
    done = CliRunner().invoke(main, [*SMALL, *options, "--json"])
    assert done.exit_code in (0, 1, 2), done.output
    return done.exit_code, json.loads(done.stdout) if done.exit_code < 2 else None, done.output


def test_differences_are_counted_and_end_in_exit_code_1(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy_peers, "GROWING", (10, 50))
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [[i % 7, 100 + i % 7, 200 + i] for i in range(60)])
    code, result, _ = run("--libcachesim", peer, "--trace", str(trace), "--out", str(tmp_path / "out"))
    assert code == 1
    different = {row["policy"]: 0 for row in result["agreement"]}
    for row in result["agreement"]:
        different[row["policy"]] += row["num_different"]
    assert (
        different["fifo"] == different["lru"] == 0 and min(different[p] for p in ("lfu", "arc", "sieve", "s3fifo")) > 0
    )
    assert {row["capacity"] for row in result["agreement"] if row["policy"] == "s3fifo" and row["requests"] == "compared"} == {
        20, 37, 100, 1_000, 5_000,
    }  # fmt: skip
    assert all(own["ratio"]["median"] > 0 and len(own["rounds"]["sagellm"]) == 2 for own in result["batch"].values())
    assert result["about"]["libCacheSim"]["version"] == "0.3.5"
    assert result["prefix"]["num_rows"] == 60 and result["options"]["trace"] == "trace.jsonl"
    assert result == json.loads((tmp_path / "out" / "policy_peers.json").read_text())
    text = (tmp_path / "out" / "policy_peers.md").read_text()
    assert text == markdown(result) and "ours over theirs" in text and str(tmp_path) not in text


def test_alone_it_measures_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy_peers, "GROWING", ())
    write_trace(tmp_path / "trace", [[1, 2]])
    code, result, _ = run("--trace", str(tmp_path / "trace"))
    assert code == 0 and result["agreement"] == [] and set(result["about"]) == {"sagellm"}
    assert "libCacheSim" not in markdown(result).split("\n", 1)[1]


def test_what_cannot_be_measured_is_misuse(tmp_path: Path):
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 5}\n')
    code, _, output = run("--trace", str(tmp_path / "trace.jsonl"))
    assert code == 2 and "trace.jsonl, line 1: has no hash_ids" in " ".join(output.split())
    code, _, output = run("--libcachesim", sys.executable)
    assert code == 2 and "libCacheSim: ModuleNotFoundError" in output


def test_workloads_are_what_they_say():
    keys = zipf(1, 20_000, 50, 1.0)
    counts = sorted((keys == key).sum() for key in set(keys.tolist()))[::-1]
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.1) and counts[0] / counts[9] == pytest.approx(10, rel=0.2)
    assert (zipf(1, 100, 50, 1.0) == zipf(1, 100, 50, 1.0)).all() and (
        zipf(2, 100, 50, 1.0) != zipf(1, 100, 50, 1.0)
    ).any()
    rows = sessions(1, 300, 10, 4)
    above: dict[int, int] = {}
    for first, last in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        row = [-1, *rows.keys[first:last].tolist()]
        assert len(row) > 1 and all(above.setdefault(key, parent) == parent for parent, key in itertools.pairwise(row))
