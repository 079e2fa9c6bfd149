"""`kill -9` of a writer at any instant: what was committed is there, whole; what was in flight is not, or whole as well."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from tests.kv_runtime.disk_writer import open_store, pattern

NUM_KILLS = 60


def kill_one(server: subprocess.Popen, seed: int, choice: random.Random) -> list[str]:
    """The lines of a writer that was killed in the middle of something."""
    server.stdin.write(b"%d\n" % seed)
    lines = [server.stdout.readline().decode().split()[1]]
    for _ in range(choice.randrange(40)):
        lines.append(server.stdout.readline().decode().strip())
    end = time.perf_counter() + choice.random() * 5e-4
    while time.perf_counter() < end:  # so that it falls into any part of what comes next
        pass
    os.kill(int(lines[0]), signal.SIGKILL)
    while lines[-1] != "end":
        lines.append(server.stdout.readline().decode().strip())
    return lines[1:-1]


def follow(lines: list[str], held: set[int]) -> set[int]:
    """Change `held` as the lines say; returns what was in flight, which may be there or not."""
    for line in lines:
        what, key = line.split()
        if what == "c":
            held.add(int(key))
        elif what == "r":
            held.discard(int(key))
    return {int(lines[-1].split()[1])} if lines and lines[-1][0] in "wr" else set()


def test_a_killed_writer_loses_no_more_than_what_was_in_flight(tmp_path: Path):
    choice = random.Random(1)
    held: set[int] = set()
    seen: Counter[str] = Counter()
    command = [sys.executable, "-W", "ignore", "-m", "tests.kv_runtime.disk_writer", str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], bufsize=0
    ) as server:
        for seed in range(1, NUM_KILLS + 1):
            in_flight = follow(kill_one(server, seed, choice), held)
            store = open_store(str(tmp_path))
            found = set(store.keys())
            assert held - in_flight <= found <= held | in_flight
            for key in found:
                assert np.array_equal(store.read(key, digest=key.to_bytes(16, "little")), pattern(key))
            seen.update({name: count for name, count in store.counters().items() if name.startswith("dropped")})
            assert len(list(tmp_path.iterdir())) == len(found) + 1, "a file was left behind"  # and the lock
            store.close()
            held = found
        server.stdin.close()
    # The kills did hit writers in the middle of a file, and nothing but such files had to go.
    assert seen.keys() == {"dropped unfinished"}, seen
