"""Writers that are there to be killed: `python -m tests.kv_runtime.disk_writer FOLDER`.

For each line on standard input a process is forked that writes, reads and removes blocks until it is killed; the next one is
started when it has ended. A line is a seed, or a seed and "CALL WHEN": then the writer kills itself at a call of `os.CALL`,
before it, after it, or when half of it is done ("half", of a write).

Lines on standard output, each written at once: "pid N" of the writer, "w KEY" before it writes a block, "c KEY" once that is
committed, "r KEY" before it removes one, and "end" when it is dead. So the lines say what the folder must hold, but for the
block of the last one, which was in flight.
"""

import os
import random
import signal
import sys

import numpy as np

from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_runtime.disk_store import DiskStore

SIZE_BYTES = 1 << 20  # large enough for a kill to come in the middle of it
COUNT = np.arange(SIZE_BYTES // 8, dtype=np.uint64)


def pattern(key: int) -> np.ndarray:
    """uint8 [SIZE_BYTES] that no other key has; quick to make, so that writing is most of what a writer does."""
    return (COUNT ^ np.uint64(key)).view(np.uint8)


def open_store(folder: str) -> DiskStore:
    return DiskStore(folder, 64 * SIZE_BYTES, layout="killed")


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def die_at(call: str, when: str, after: int) -> None:
    """Kill this process at the call of `os.call` that comes after so many others."""
    real = getattr(os, call)
    calls = iter(range(after))

    def die(*arguments: object, **options: object) -> object:
        if next(calls, None) is not None:
            return real(*arguments, **options)
        if when == "half":
            os.write(arguments[0], b"".join(arguments[1])[: SIZE_BYTES // 2])
        elif when == "after":
            real(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, call, die)


def write_until_killed(folder: str, seed: int, call: str = "", when: str = "") -> None:
    store = open_store(folder)
    choice = random.Random(seed)
    key = seed << 32
    say(f"pid {os.getpid()}")
    if call:
        die_at(call, when, after=choice.randrange(12))
    while True:
        if len(store) > 8 or (len(store) > 2 and choice.random() < 0.3):
            victim = choice.choice(store.keys())
            say(f"r {victim}")
            store.remove(victim)
        else:
            key += 1
            say(f"w {key}")
            store.prepare(CachedBlock(BlockKey(key), size_bytes=SIZE_BYTES), key.to_bytes(16, "little"))[:] = pattern(
                key
            )
            store.commit(BlockKey(key))
            say(f"c {key}")
        if choice.random() < 0.2:
            store.read(choice.choice(store.keys()))


if __name__ == "__main__":
    for line in sys.stdin:
        writer = os.fork()
        if writer == 0:
            seed, *where = line.split()
            write_until_killed(sys.argv[1], int(seed), *where)
        os.waitpid(writer, 0)
        say("end")
