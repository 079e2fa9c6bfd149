"""Threads that look up at once: how much two get done compared with one, with and without a thread that writes.

Beside them a control: two threads that share nothing, against one. Where it is well below 2 the machine has no second core
to spare, and neither can the index show one.
"""

import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.result import Definition

OPTIONS: dict[str, Any] = {"num_tokens": 65_536, "block_size": 16, "rounds": 4, "seconds": 0.2}
NUM_PROMPTS = 8
Int32Array = NDArray[np.int32]
WRITE_TOKENS, WRITE_EVERY_S = 512, 1e-3
DEFINITIONS = {
    "prefix_readers_speedup": Definition(
        unit="x", better="higher",
        text="Lookups a second of two threads over those of one, of prompts of `num_tokens` tokens that are cached; wall "
        "clock, `seconds` each, median of `rounds`.",
    ),
    "prefix_readers_speedup_with_writer": Definition(
        unit="x", better="higher",
        text=f"The same while another thread inserts {WRITE_TOKENS} new tokens and evicts as many every millisecond.",
    ),
    "prefix_readers_kept_with_writer": Definition(
        unit="x", better="higher", text="Lookups a second of one thread beside that writer, over those without it."
    ),
    "prefix_readers_control_speedup": Definition(
        unit="x", better=None, text="Checksums a second of two threads over those of one, computed without the GIL."
    ),
    "prefix_readers_lookup_us": Definition(
        unit="us", better="lower", text="Wall time of a lookup, one thread and no writer; median of `rounds`."
    ),
}  # fmt: skip


def run(seed: int, num_tokens: int, block_size: int, rounds: int, seconds: float) -> dict[str, float]:
    if num_tokens < block_size:
        raise ValueError(f"num_tokens is {num_tokens}; allowed are {block_size}, a block, and more")
    setup = _Readers(np.random.default_rng(seed), num_tokens, block_size)
    ways = {"alone": (setup.lookup, False), "beside": (setup.lookup, True), "control": (setup.checksum, False)}
    rates: dict[tuple[str, int], list[float]] = {(name, threads): [] for name in ways for threads in (1, 2)}
    for number in range(rounds):
        for name, threads in list(rates) if number % 2 == 0 else list(rates)[::-1]:
            rates[name, threads].append(setup.rate(threads, *ways[name], seconds))
    found = {key: np.array(values) for key, values in rates.items()}
    return {
        "prefix_readers_speedup": float(np.median(found["alone", 2] / found["alone", 1])),
        "prefix_readers_speedup_with_writer": float(np.median(found["beside", 2] / found["beside", 1])),
        "prefix_readers_kept_with_writer": float(np.median(found["beside", 1] / found["alone", 1])),
        "prefix_readers_control_speedup": float(np.median(found["control", 2] / found["control", 1])),
        "prefix_readers_lookup_us": float(np.median(1e6 / found["alone", 1])),
    }


class _Readers:
    """An index with the prompts in it, locked so that the writer's evictions spare them."""

    def __init__(self, random: np.random.Generator, num_tokens: int, block_size: int) -> None:
        from sagellm.prefix_reuse import PrefixReuseIndex

        self._index, self._random = PrefixReuseIndex(block_size), random
        self._prompts = [random.integers(0, 1 << 17, num_tokens, np.int32) for _ in range(NUM_PROMPTS)]
        self._num_blocks = num_tokens // block_size
        self._write_blocks = WRITE_TOKENS // block_size
        for number, prompt in enumerate(self._prompts):
            self._index.insert(prompt, np.arange(self._num_blocks, dtype=np.int32) + number * self._num_blocks)
            self._index.lookup(prompt, lock=True)

    def lookup(self, prompt: Int32Array) -> None:
        found = self._index.lookup(prompt).matched_length
        if found != self._num_blocks * self._index.block_size:
            raise RuntimeError(f"a reader found {found} tokens of a prompt of {len(prompt)}")

    def checksum(self, prompt: Int32Array) -> None:
        zlib.crc32(prompt[: len(prompt) // 4])  # takes about as long as a lookup

    def rate(self, num_readers: int, work: Callable[[Int32Array], None], writing: bool, seconds: float) -> float:
        """Prompts a second of all readers together. Raises what a thread raised."""
        stop, start = threading.Event(), threading.Barrier(num_readers + 1)
        with ThreadPoolExecutor(num_readers + 1) as pool:
            readers = [pool.submit(self._read, number, work, start, stop) for number in range(num_readers)]
            writer = pool.submit(self._write, stop) if writing else None
            start.wait()
            stop.wait(seconds)
            stop.set()
            if writer is not None:
                writer.result()
            return sum(reader.result() for reader in readers)

    def _read(
        self, number: int, work: Callable[[Int32Array], None], start: threading.Barrier, stop: threading.Event
    ) -> float:
        prompts, count = self._prompts[number:] + self._prompts[:number], 0
        start.wait()
        began_s = time.perf_counter()
        while True:  # at least once, however late the thread got a core
            for prompt in prompts:
                work(prompt)
            count += len(prompts)
            if stop.is_set():
                return count / (time.perf_counter() - began_s)

    def _write(self, stop: threading.Event) -> None:
        index, first = self._index, NUM_PROMPTS * self._num_blocks
        free = np.arange(first, first + 4 * self._write_blocks, dtype=np.int32)
        while True:
            ids, free = free[: self._write_blocks], free[self._write_blocks :]
            index.insert(self._random.integers(0, 1 << 17, WRITE_TOKENS, np.int32), ids)
            free = np.concatenate([free, index.evict_lru(self._write_blocks).kv_block_ids])
            if stop.wait(WRITE_EVERY_S):
                return
