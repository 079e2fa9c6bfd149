"""Slots of a pool, and compaction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.errors import CapacityError, TierError
from sagellm.core.hooks import Tier
from sagellm.kv_runtime.base import AllocationResult
from sagellm.kv_runtime.fragmentation import fragmentation
from sagellm.kv_runtime.pool import KVPool


def test_the_lowest_slots_are_given_out_first():
    pool = KVPool(6, 8, Tier.CPU)
    assert pool.allocate(2) == AllocationResult((0, 1), Tier.CPU)
    assert pool.allocate(3).block_ids == (2, 3, 4)
    pool.free([3, 0])
    assert pool.allocate(2).block_ids == (0, 3) and pool.num_free == 1
    assert pool.get_utilization() == pytest.approx(5 / 6)
    assert pool.allocate(0).block_ids == ()


def test_more_than_is_free_is_refused_whole():
    pool = KVPool(4, 8)
    pool.allocate(3)
    with pytest.raises(CapacityError, match="2 blocks wanted, 1 of 4 free on tier cpu; free some first"):
        pool.allocate(2)
    assert pool.allocate(1).block_ids == (3,)
    with pytest.raises(TierError):
        pool.allocate(-1)


def test_runs_come_from_the_smallest_that_is_large_enough():
    pool = KVPool(10, 8)
    pool.allocate(10)
    pool.free([1, 2, 3, 5, 6, 9])
    assert pool.get_fragmentation() == pytest.approx(0.5)
    assert pool.allocate(2, contiguous=True).block_ids == (5, 6)
    with pytest.raises(CapacityError, match="4 blocks in one run wanted; 4 are free on tier cpu, at most 3 in one run"):
        pool.allocate(4, contiguous=True)
    assert pool.allocate(4).block_ids == (1, 2, 3, 9)
    assert pool.get_fragmentation() == 0 and pool.get_utilization() == 1
    with pytest.raises(CapacityError):
        pool.allocate(1, contiguous=True)
    assert pool.allocate(0, contiguous=True).block_ids == ()


@pytest.mark.parametrize("slots", [[0], [4], [-1], [1, 1], [1, 2], [1.0], [None]])
def test_what_is_not_in_use_cannot_be_freed(slots: list[int]):
    pool = KVPool(4, 8)
    pool.allocate(2)
    pool.free([0])
    with pytest.raises(TierError, match="is not in use"):
        pool.free(slots)
    assert pool.num_used == 1 and pool.view(1).size == 8
    assert pool.allocate(3).block_ids == (0, 2, 3)


@pytest.mark.parametrize("sizes", [(1.5, 8), (4, 8.0), ("4", 8), (0, 8), (4, -1), (True, 8)])
def test_a_pool_of_no_size_is_refused(sizes: tuple):
    with pytest.raises(TierError, match="holds nothing; give at least 1 of 1"):
        KVPool(*sizes)


def test_numbers_that_are_no_slots_are_refused():
    pool = KVPool(4, 8)
    assert pool.allocate(np.int64(2)).block_ids == (0, 1)
    with pytest.raises(TierError, match="1.5 slots asked for"):
        pool.allocate(1.5)
    with pytest.raises(TierError, match="slot 0.0 of tier cpu is not in use"):
        pool.view(0.0)
    pool.free([np.int64(1)])
    assert pool.num_free == 3


def test_slots_are_memory_of_their_own():
    pool = KVPool(3, 5)
    for slot in pool.allocate(3).block_ids:
        pool.view(slot)[:] = slot + 1
    assert [pool.view(slot).tolist() for slot in range(3)] == [[1] * 5, [2] * 5, [3] * 5]
    pool.free([1])
    for slot in (1, 3, -1):
        with pytest.raises(TierError, match="is not in use"):
            pool.view(slot)


def test_memory_may_be_given():
    memory = np.zeros(24, np.uint8)
    pool = KVPool(3, 8, memory=memory)
    pool.view(pool.allocate(2).block_ids[1])[:] = 7
    assert memory.tolist() == [0] * 8 + [7] * 8 + [0] * 8
    frozen = np.zeros(24, np.uint8)
    frozen.flags.writeable = False
    for bad in (np.zeros(23, np.uint8), np.zeros(24, np.int8), np.zeros(48, np.uint8)[::2], frozen):
        with pytest.raises(TierError, match="memory is"):
            KVPool(3, 8, memory=bad)


def test_plain_memory_begins_at_a_page():
    pool = KVPool(2, 4096)
    assert pool.view(pool.allocate(1).block_ids[0]).ctypes.data % 4096 == 0


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0), (-1, 8)])
def test_a_pool_holds_something(sizes: tuple[int, int]):
    with pytest.raises(TierError, match="holds nothing"):
        KVPool(*sizes)


def test_memory_that_cannot_be_had():
    with pytest.raises(CapacityError, match="make the pool smaller"):
        KVPool(1 << 40, 1 << 30)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 99)), max_size=40))
def test_no_slot_has_two_owners(steps: list[tuple[int, bool, int]]):
    pool = KVPool(12, 1)
    runs: list[tuple[int, ...]] = []
    for count, contiguous, choice in steps:
        try:
            runs.append(pool.allocate(count, contiguous=contiguous).block_ids)
        except CapacityError:
            if runs:
                pool.free(runs.pop(choice % len(runs)))
        if runs and contiguous and choice > 60:
            assert list(runs[-1]) == sorted(runs[-1])
        used = [slot for run in runs for slot in run]
        assert len(set(used)) == len(used) == pool.num_used == 12 - pool.num_free


def pattern(text: str) -> np.ndarray:
    """bool [n], True where the text has a dot, which stands for a free slot."""
    return np.array([letter == "." for letter in text])


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 0), ("xx", 0), ("....", 0), ("xx..", 0), (".x.x", 0.5), ("..x.", 1 / 3), (".x.x.x.x", 0.75)],
)
def test_fragmentation(text: str, value: float):
    assert fragmentation(pattern(text)) == pytest.approx(value)


def test_a_run_that_was_wanted_can_be_had():
    pool = KVPool(64, 8)
    pool.allocate(64)
    pool.free(range(0, 64, 2))
    with pytest.raises(CapacityError, match="in one run; free some first"):
        pool.allocate(8, contiguous=True)
    pool.free(range(1, 16, 2))
    assert len(pool.allocate(8, contiguous=True).block_ids) == 8
