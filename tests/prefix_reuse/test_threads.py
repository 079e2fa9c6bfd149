"""Readers and writers at once. Every answer must be one that the index could have given alone at some moment."""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from sagellm.prefix_reuse import PrefixMirror, PrefixReuseIndex
from tests.prefix_reuse.cases import mirrored, sequence

NUM_READERS = 3
BLOCK = 16
LONG = 40_000  # blocks: calls on so many tokens run without the GIL, and long enough to meet each other
MOST_CALLS = 1_000_000


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*workers: Iterator[None], calls: int, until: Callable[[], bool] = lambda: True) -> None:
    """Advance each worker on a thread of its own, until all were advanced `calls` times and `until()`."""
    counts, faults = [0] * len(workers), []

    def run(own: int) -> None:
        try:
            while not faults and (min(counts) < calls or not until()):
                next(workers[own])
                counts[own] += 1
                time.sleep(0)  # lets another go on here too, not only where the interpreter happens to switch
                assert counts[own] < MOST_CALLS, f"what the test waits for never came in {counts} calls"
        except BaseException as fault:
            faults.append(fault)

    with ThreadPoolExecutor(len(workers)) as threads:
        list(threads.map(run, range(len(workers))))
    if faults:
        raise faults[0]


@pytest.mark.parametrize("num_blocks", [8, LONG])
def test_a_reader_sees_a_whole_insertion_or_none(num_blocks):
    """Ids of one insertion follow each other, so that a mixture of two would show."""
    index = PrefixReuseIndex(BLOCK)
    tokens, ids = np.arange(num_blocks * BLOCK, dtype=np.int32), np.arange(num_blocks, dtype=np.int32)
    looks, turns = [], []

    def write() -> Iterator[None]:
        for turn in itertools.count():
            index.insert(tokens, ids + turn % 7 * num_blocks)
            before = len(looks)
            while len(looks) < before + 2:  # until a reader is likely in the middle of its next lookup
                yield
            index.invalidate(tokens)
            turns.append(turn)
            yield

    def read() -> Iterator[None]:
        while True:
            found = index.lookup(tokens, touch=False).kv_block_ids
            first = int(found[0]) if len(found) else None
            assert first is None or np.array_equal(found, ids + first)
            looks.append(first)
            yield

    together(write(), *[read() for _ in range(NUM_READERS)], calls=300, until=lambda: len(turns) > 300)
    assert set(looks) == {None, *range(0, 7 * num_blocks, num_blocks)}
    index.check()


@pytest.mark.parametrize("touch", [False, True])
def test_a_reader_sees_true_prefixes(touch):
    """A block's id is a function of all tokens before its end, so that the block of another prefix would show."""
    index = PrefixReuseIndex(2)
    paths = list(itertools.product(range(3), repeat=4))
    prefixes = {path[:length] for path in paths for length in range(1, 5)}
    number = {prefix: row for row, prefix in enumerate(sorted(prefixes))}
    ids_of = {path: [number[path[:length]] for length in range(1, 5)] for path in paths}
    lengths = set()

    def write() -> Iterator[None]:
        for turn, path in enumerate(itertools.cycle(paths[::2] + paths[1::2])):
            index.insert(sequence(path, 2), ids_of[path])
            if turn % 5 == 0:
                index.evict_lru(13)
            if turn % 11 == 0:
                index.invalidate(sequence(path[: turn % 3 + 1], 2))
            yield

    def read(start: int) -> Iterator[None]:
        for path in itertools.cycle(paths[start:] + paths[:start]):
            hit = index.lookup(sequence(path, 2), touch=touch)
            assert hit.kv_block_ids.tolist() == ids_of[path][: len(hit.kv_block_ids)]
            assert hit.matched_length == 2 * len(hit.kv_block_ids)
            lengths.add(hit.matched_length)
            yield

    together(write(), *[read(start) for start in range(NUM_READERS)], calls=2000, until=lambda: len(lengths) == 5)
    index.check()


def test_what_a_reader_locks_stays():
    index = PrefixReuseIndex(2)
    paths = list(itertools.product(range(3), repeat=3))
    held = set()

    def write() -> Iterator[None]:
        for path in itertools.cycle(paths):
            resident = index.lookup(sequence(path, 2)).kv_block_ids.tolist()
            free = np.flatnonzero(~index.contains(range(100))).tolist()
            index.insert(sequence(path, 2), [*resident, *free][: len(path)])
            index.evict_lru(2)
            yield

    def read(start: int) -> Iterator[None]:
        for path in itertools.cycle(paths[start:] + paths[:start]):
            hit = index.lookup(sequence(path, 2), lock=True)
            yield
            assert index.contains(hit.kv_block_ids).all()
            held.add(len(hit.kv_block_ids))
            index.unlock(hit.lock)

    readers = [read(start) for start in range(NUM_READERS)]
    together(write(), *readers, calls=1000, until=lambda: held == {0, 1, 2, 3})
    for reader in readers:
        next(reader)  # each may have stopped while it holds a lock, or not
    index.check()
    assert index.metrics()["locks"] == NUM_READERS
    locked = index.num_blocks() - len(index.blocks(unlocked=True).tiers)
    index.evict_lru(100)
    assert index.num_blocks() == locked


def test_writers_share_the_ids_among_them():
    """An id is cached or free, never both and never neither, whichever writer evicts it."""
    index = PrefixReuseIndex(2)
    free: list[int] = list(range(90))

    def write(own: int) -> Iterator[None]:
        mine: list[int] = []
        for turn in itertools.count():
            while free and len(mine) < 3:
                with suppress(IndexError):  # another writer was faster
                    mine.append(free.pop())
            if len(mine) < 3:
                free.extend(index.evict_lru(6).kv_block_ids.tolist())
            else:
                kept = index.insert(sequence([own, turn % 5, turn % 7], 2), mine).kv_block_ids.tolist()
                free.extend(block for block in mine if block not in kept)
                mine.clear()
            in_hand[own] = list(mine)
            yield

    in_hand = [[] for _ in range(NUM_READERS)]
    together(*[write(own) for own in range(NUM_READERS)], calls=2000)
    index.check()
    cached = index.blocks().kv_block_ids.tolist()
    assert sorted([*cached, *free, *itertools.chain(*in_hand)]) == list(range(90))


def test_long_sequences_of_several_writers():
    index = PrefixReuseIndex(BLOCK)

    def write(own: int) -> Iterator[None]:
        tokens = np.arange(LONG * BLOCK, dtype=np.int32)
        tokens[0] = -1 - own & 0xFFFF  # the namespace is shared, the sequence is not
        ids = np.arange(LONG, dtype=np.int32) + own * LONG
        while True:
            assert index.insert(tokens, ids).num_new_blocks == LONG
            yield
            assert np.array_equal(index.lookup(tokens).kv_block_ids, ids)
            yield
            assert len(index.invalidate(tokens)) == LONG

    together(*[write(own) for own in range(NUM_READERS)], calls=600)
    index.check()
    assert index.num_blocks() % LONG == 0


def test_a_mirror_follows_a_busy_index():
    index, mirror = PrefixReuseIndex(2, event_capacity=50), PrefixMirror(2)

    def write() -> Iterator[None]:
        for turn in itertools.count():
            free = np.flatnonzero(~index.contains(range(60)))[:3]
            index.insert(sequence([turn % 3, turn % 4, turn % 5], 2), free)
            if turn % 3 == 0:
                index.evict_lru(3)
            if turn % 50 == 0:
                index.clear()
            yield

    def follow() -> Iterator[None]:
        while True:
            mirror.catch_up(index)
            yield

    def look() -> Iterator[None]:
        while True:
            blocks = index.blocks()
            assert len(set(blocks.kv_block_ids.tolist())) == len(blocks.tiers)
            assert all(entry.token_length == 2 * len(entry.kv_block_ids) for entry in index.entries())
            yield

    together(write(), follow(), look(), calls=400)
    mirror.catch_up(index)
    assert mirrored(mirror, index)
