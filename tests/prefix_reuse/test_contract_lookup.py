"""Tests of the promises of `base.PrefixIndex` about lookups and locks; see test_contract.py."""

import numpy as np
import pytest

from sagellm.core.errors import LockError
from tests.prefix_reuse.cases import (
    A,
    B,
    C,
    D,
    places,
    rows,
    sequence,
)

# lookup


def test_a_hit_tells_what_was_found(index):
    index.insert(A + B + C, [0, 1, 2])
    index.move([1], [7], "gpu", "cpu")
    hit = index.lookup(A + B + D + [9])
    assert (hit.matched_length, hit.remaining_tokens, hit.confidence) == (4, 3, 1.0)
    assert places(hit) == [(0, 0), (1, 7)]
    assert hit.kv_block_ids.dtype == np.int32 and hit.tiers.dtype == np.int8
    assert hit.lock == 0
    assert places(index.entry(hit.entry_id)) == places(hit)
    with pytest.raises(ValueError):
        hit.kv_block_ids[0] = 3


def test_a_miss(index):
    for tokens in (A, [], [1], [1, 9]):
        hit = index.lookup(tokens)
        assert (hit.matched_length, hit.remaining_tokens, places(hit), hit.entry_id) == (0, len(tokens), [], 0)
        assert hit.confidence == 1.0


def test_hits_keep_their_blocks_while_others_come_and_go(index):
    """Memory of hits that died is used again, by size: none may get that of one that lives, or of an array on it."""
    count = 2100
    tokens = np.arange(2 * count, dtype=np.int32)
    index.insert(tokens, np.arange(count, dtype=np.int32))
    random = np.random.default_rng(3)
    alive, arrays = {}, {}
    for turn in range(2000):
        size = int(random.choice([1, 63, 64, 65, 255, 256, 257, 512, 1023, 1024, 1025, count]))
        hit = index.lookup(tokens[: 2 * size])
        alive[int(random.integers(8))] = (size, hit)
        arrays[int(random.integers(8))] = (size, hit.kv_block_ids if turn % 2 else hit.tiers)
        del hit
    for size, hit in alive.values():
        assert np.array_equal(hit.kv_block_ids, np.arange(size)) and not hit.tiers.any() and len(hit.tiers) == size
    for size, array in arrays.values():
        assert len(array) == size
        assert not array.any() if array.dtype == np.int8 else np.array_equal(array, np.arange(size))


def test_a_hit_outlives_the_index(index):
    index.insert(A + B, [0, 1])
    hit = index.lookup(A + B)
    index.clear()
    index.insert(C + D, [0, 1], tier="cpu")
    del index
    assert places(hit) == [(0, 0), (0, 1)]


def test_a_lookup_that_touches_names_an_entry(index):
    index.insert(A + B + C, [0, 1, 2])
    hit = index.lookup(A + D)
    assert index.tokens(hit.entry_id).tolist() == A
    assert index.lookup(A + D, touch=False).entry_id == hit.entry_id


def test_a_lock_on_nothing(index):
    hit = index.lookup(A, "x", lock=True)
    assert hit.lock and hit.matched_length == 0
    assert (index.namespaces(), index.metrics()["locks"]) == ([], 1)
    index.extend(hit.lock, A, [0])
    assert index.lookup(A, "x").matched_length == 2
    index.unlock(hit.lock)
    assert index.metrics()["locks"] == 0


def test_a_lock_in_the_middle_of_a_sequence(index):
    index.insert(A + B + C + D, [0, 1, 2, 3])
    lock = index.lookup(A + B, lock=True, touch=False).lock
    assert {block: locks for _, block, *_, locks in rows(index.blocks())} == {0: 1, 1: 1, 2: 0, 3: 0}
    assert sorted(index.blocks(unlocked=True).kv_block_ids.tolist()) == [2, 3]
    index.unlock(lock)


@pytest.mark.parametrize("times", [1, 2])
def test_a_lock_is_released_once(index, times):
    index.insert(A, [0])
    locks = [index.lookup(A, lock=True).lock for _ in range(times)]
    assert len(set(locks)) == times
    for lock in locks:
        assert rows(index.blocks())[0][-1] > 0
        index.unlock(lock)
        with pytest.raises(LockError):
            index.unlock(lock)
    assert rows(index.blocks())[0][-1] == 0
    for unknown in (0, 10**15):
        with pytest.raises(LockError):
            index.unlock(unknown)


def test_lookup_tiers_from_long_to_short(index):
    index.insert(sequence(range(5), 2), range(5))
    index.move([2, 4], [2, 4], "gpu", "cpu")
    index.move([3], [3], "gpu", "nvme")
    found = index.lookup_tiers([*sequence(range(5), 2), 9])
    assert [hit.matched_length for hit in found] == [10, 6, 4]
    assert [hit.remaining_tokens for hit in found] == [1, 5, 7]
    assert places(found[0]) == [(0, 0), (0, 1), (1, 2), (2, 3), (1, 4)]
    assert places(found[1]) == places(found[0])[:3] and places(found[2]) == places(found[0])[:2]
    assert all(hit.lock == 0 and hit.confidence == 1.0 for hit in found)


@pytest.mark.parametrize("tiers, lengths", [(["gpu", "gpu"], [4]), (["cpu", "gpu"], [4]), (["nvme"], [2]), ([], [])])
def test_lookup_tiers_has_only_candidates_that_are_longer(index, tiers, lengths):
    index.insert(sequence(range(len(tiers)), 2), range(len(tiers)))
    for row, tier in enumerate(tiers):
        if tier != "gpu":
            index.move([row], [row], "gpu", tier)
    assert [hit.matched_length for hit in index.lookup_tiers(sequence(range(len(tiers)), 2) + C)] == lengths
