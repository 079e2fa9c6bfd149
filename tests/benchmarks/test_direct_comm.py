"""Collectives timed at the process group: in a process of its own, whose torch is changed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.direct_comm import exposed_s

RANK = """
import sys, time
from datetime import timedelta
import torch
from torch import distributed
from benchmarks.direct_comm import DirectTimer

folder = sys.argv[1]
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(sys.argv[2]), world_size=2)
timer = DirectTimer(folder)
if sys.argv[2] == "1":
    time.sleep(1.5)
distributed.all_reduce(torch.ones(4))
handle = distributed.broadcast(torch.ones(4), 0, async_op=True)
time.sleep(0.3)
handle.wait()
timer.close()
"""


@pytest.mark.slow
def test_waiting_is_timed_and_computing_is_not(tmp_path: Path):
    begin = time.monotonic_ns()
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), str(rank)]) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    found = exposed_s(tmp_path, begin, time.monotonic_ns())
    early, late = (found[f"direct-{rank.pid}"] for rank in ranks)
    assert early - late > 0.5, "only the first had to wait for the other"
    starts = [json.loads((tmp_path / f"direct-{rank.pid}.json").read_text()) for rank in ranks]
    assert [len(spans) for spans in starts] == [4, 4], "two starts, two waits"


def test_only_what_lies_in_the_window_counts(tmp_path: Path):
    (tmp_path / "direct-1.json").write_text(json.dumps([[0, 10], [20, 30], [40, 60]]))
    (tmp_path / "direct-2.json").write_text("[]")
    assert exposed_s(tmp_path, 25, 50) == {"direct-1": 15 / 1e9}
