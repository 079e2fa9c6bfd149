"""`kill -9` of a writer at any instant: what was committed is there, whole; what was in flight is not, or whole as well."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.kv_runtime.disk_writer import open_store, pattern

NUM_KILLS = 40
# Each step of a write and of a removal. "close" is also that of a read.
STEPS = [
    f"{call} {when}"
    for call in ("open", "writev", "utime", "close", "rename", "unlink")
    for when in ("before", "after")
]
STEPS += ["writev half"]


class Writers:
    """Writers of one folder, one after the other, and what they must have left there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: set[int] = set()
        self.dropped: Counter[str] = Counter()
        command = [sys.executable, "-W", "ignore", "-m", "tests.kv_runtime.disk_writer", str(folder)]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], bufsize=0
        )

    def run(self, line: str, kill: Callable[[int], None] | None = None) -> None:
        """Start a writer, and end it by `kill(pid)` if it does not end itself; then look at what it left."""
        self._server.stdin.write(f"{line}\n".encode())
        pid = int(self._read().split()[1])
        if kill is not None:
            kill(pid)
        lines = list(iter(self._read, "end"))
        self._check(follow(lines, self.held))

    def _check(self, in_flight: set[int]) -> None:
        store = open_store(str(self.folder))
        found = set(store.keys())
        assert self.held - in_flight <= found <= self.held | in_flight
        for key in found:
            assert np.array_equal(store.read(key, digest=key.to_bytes(16, "little")), pattern(key))
        dropped = {name: count for name, count in store.counters().items() if name.startswith("dropped")}
        self.dropped.update(dropped)
        assert len(list(self.folder.iterdir())) == len(found) + 1, "a file was left behind"  # and the lock
        store.close()
        self.held = found

    def _read(self) -> str:
        return self._server.stdout.readline().decode().strip()

    def close(self) -> None:
        with self._server as server:
            server.stdin.close()


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    writers = Writers(tmp_path)
    yield writers
    writers.close()


def follow(lines: list[str], held: set[int]) -> set[int]:
    """Change `held` as the lines say; returns what was in flight, which may be there or not."""
    for line in lines:
        what, key = line.split()
        if what == "c":
            held.add(int(key))
        elif what == "r":
            held.discard(int(key))
    return {int(lines[-1].split()[1])} if lines and lines[-1][0] in "wr" else set()


def test_a_killed_writer_loses_no_more_than_what_was_in_flight(writers: Writers):
    choice = random.Random(1)

    def kill(pid: int) -> None:
        end = time.perf_counter() + choice.random() * 0.02
        while time.perf_counter() < end:  # so that it falls into any part of anything
            pass
        os.kill(pid, signal.SIGKILL)

    for seed in range(1, NUM_KILLS + 1):
        writers.run(str(seed), kill)
    assert writers.dropped.keys() <= {"dropped unfinished"}, "something else than a file in flight was lost"


def test_a_writer_may_die_at_each_step(writers: Writers):
    for seed, step in enumerate(STEPS * 2, 1):
        writers.run(f"{seed} {step}")
    assert writers.dropped.keys() == {"dropped unfinished"}
