"""Tests of the promises of `base.PrefixIndex` about insert and extend; see test_contract.py."""

import numpy as np
import pytest

from sagellm.core.errors import BlockReuseError, LockError, PrefixIndexError
from sagellm.prefix_reuse.matcher import prefix_hashes
from tests.prefix_reuse.cases import (
    A,
    B,
    C,
    D,
    contents,
    ids,
    places,
    removed,
    rows,
    stamps,
)

# insert


def test_a_last_part_is_left_out(index):
    entry = index.insert([*A, 9], [0])
    assert (entry.token_length, places(entry)) == (2, [(0, 0)])
    entry = index.insert([*A, *B, 9], [0, 1, 2])
    assert (entry.token_length, places(entry), entry.num_new_blocks) == (4, [(0, 0), (0, 1)], 1)
    assert not index.contains([2])[0]


@pytest.mark.parametrize(
    "tokens, given", [(A, []), (A, [0, 1]), (A + B, [0]), ([*A, 9], [0, 1, 2]), ([9], [0, 1]), ([], [0])]
)
def test_one_id_for_each_full_block_and_one_for_the_rest(index, tokens, given):
    with pytest.raises(PrefixIndexError):
        index.insert(tokens, given)
    assert index.num_blocks() == 0


@pytest.mark.parametrize("tier", ["gpu", "cpu", "nvme"])
def test_a_block_on_this_tier_or_a_faster_one_stays(index, tier):
    index.insert(A + B, [0, 1])
    entry = index.insert(A + B + C, [5, 6, 7], tier=tier)
    assert entry.kv_block_ids.tolist() == [0, 1, 7]
    assert (entry.num_new_blocks, entry.replaced) == (1, None)
    assert index.contains([5, 6], tier).tolist() == [False, False]


def test_a_block_on_a_slower_tier_is_replaced(index):
    index.insert(A, [0], tier="gpu")
    index.insert(A + B, [5, 1], tier="cpu")
    index.insert(A + B + C, [6, 7, 2], tier="nvme")
    entry = index.insert(A + B + C, [0, 10, 11])
    assert (places(entry), entry.num_new_blocks) == ([(0, 0), (0, 10), (0, 11)], 0)
    assert removed(entry.replaced) == [(1, 1), (2, 2)]
    assert places(entry.replaced) == [(2, 2), (1, 1)]
    assert (ids(index, "cpu"), ids(index, "nvme")) == ([], [])
    assert index.metrics()["removed_blocks"]["replaced"] == 2
    index.insert(D, [1], tier="cpu")  # its place is free


def test_what_hangs_below_a_replaced_block_and_its_locks_stay(index):
    index.insert(A + B + C, [0, 1, 2], tier="cpu")
    lock = index.lookup(A + B, lock=True).lock
    index.insert(A + B, [5, 6])
    assert places(index.lookup(A + B + C)) == [(0, 5), (0, 6), (1, 2)]
    assert {block: locks for _, block, *_, locks in rows(index.blocks())} == {5: 1, 6: 1, 2: 0}
    index.unlock(lock)


def test_ids_cached_elsewhere_are_refused(index):
    index.insert(A + B, [0, 1])
    before = rows(index.blocks())
    for tokens, given in (
        (C, [0]),
        (A + B, [1, 0]),
        (A + C, [0, 1]),
        (A + B + C, [0, 1, 1]),
        (C + D, [2, 2]),
        (A + B, [2, 0]),
    ):
        with pytest.raises(BlockReuseError):
            index.insert(tokens, given)
        assert rows(index.blocks()) == before
    with pytest.raises(BlockReuseError):
        index.insert(A, [0], "elsewhere")
    assert index.namespaces() == [""]


def test_the_id_of_a_last_part_may_be_any(index):
    index.insert(A, [0])
    assert index.insert([*A, *B, 9], [0, 1, 0]).num_new_blocks == 1


def test_an_id_is_free_once_its_block_left(index):
    index.insert(A, [0])
    index.evict_lru(1)
    index.insert(B, [0])
    assert places(index.lookup(B)) == [(0, 0)]


def test_metadata_is_of_exactly_one_prefix(index):
    index.insert(A + B, [0, 1], metadata={"turn": [1, None, "ä"]})
    assert index.insert(A, [0]).metadata is None
    assert index.insert(A + B + C, [0, 1, 2]).metadata is None
    assert index.insert(A + B, [0, 1]).metadata == {"turn": [1, None, "ä"]}
    assert index.insert(A + B, [0, 1], metadata={}).metadata == {}
    assert contents(index)[""][0][2] is None


def test_metadata_is_a_copy(index):
    given = {"turns": [1]}
    entry = index.insert(A, [0], metadata=given)
    given["turns"].append(2)
    assert index.entry(entry.entry_id).metadata == {"turns": [1]}


@pytest.mark.parametrize("metadata", [{"x": {1}}, {"x": object()}, {("a", 1): 2}, [1], "text", 7])
def test_metadata_that_is_no_json_is_refused(index, metadata):
    with pytest.raises(PrefixIndexError):
        index.insert(A, [0], metadata=metadata)
    assert index.num_blocks() == 0


def test_an_entry_tells_what_was_asked(index):
    entry = index.insert(A + B, [0, 1], "x", tier="cpu", metadata={"k": 1})
    assert (entry.token_length, places(entry), entry.num_new_blocks) == (4, [(1, 0), (1, 1)], 2)
    assert entry.kv_block_ids.dtype == np.int32 and entry.tiers.dtype == np.int8
    assert entry.token_hash == int(prefix_hashes(A + B, 2)[-1])
    assert index.insert(A + B, [2, 3], "y").token_hash == entry.token_hash
    assert entry.entry_id > 0


def test_the_empty_prefix_is_no_entry(index):
    for entry in (index.insert([], []), index.insert([9], []), index.insert([9], [3], metadata={"k": 1})):
        assert (entry.entry_id, entry.token_length, places(entry), entry.metadata) == (0, 0, [], None)
    assert (index.num_blocks(), index.namespaces()) == (0, [])
    with pytest.raises(PrefixIndexError):
        index.entry(0)


# extend


def test_extend_follows_a_locked_prefix(index):
    index.insert(A, [0], metadata={"of": "A"})
    lock = index.lookup(A, lock=True).lock
    entry = index.extend(lock, B + C, [1, 2])
    assert (entry.token_length, places(entry), entry.num_new_blocks) == (6, [(0, 1), (0, 2)], 2)
    assert entry.token_hash == int(prefix_hashes(A + B + C, 2)[-1])
    assert entry.metadata is None
    assert places(index.lookup(A + B + C + D)) == [(0, 0), (0, 1), (0, 2)]
    assert len(index.evict_lru(9)) == 0
    index.unlock(lock)
    assert len(index.evict_lru(9)) == 3


def test_extend_again_and_again(index):
    lock = index.lookup(A, "x", lock=True).lock
    for number, part in enumerate((A, B, C, D)):
        entry = index.extend(lock, part, [number], tier="cpu")
        assert (entry.token_length, places(entry), entry.num_new_blocks) == (2 * number + 2, [(1, number)], 1)
    assert index.lookup(A + B + C + D, "x").matched_length == 8
    assert {locks for *_, locks in rows(index.blocks())} == {1}
    index.unlock(lock)


def test_extend_onto_what_is_there(index):
    index.insert(A + B, [0, 1])
    index.insert(A + B + C, [4, 5, 6], tier="cpu")
    lock = index.lookup(A, lock=True).lock
    entry = index.extend(lock, B + C + D, [7, 8, 9])
    assert (places(entry), entry.num_new_blocks) == ([(0, 1), (0, 8), (0, 9)], 1)
    assert removed(entry.replaced) == [(1, 6)]
    assert len(index.evict_lru(9)) == 0


def test_extend_by_nothing(index):
    index.insert(A, [0])
    lock = index.lookup(A, lock=True).lock
    entry = index.extend(lock, [9], [])
    assert (entry.token_length, places(entry), entry.num_new_blocks) == (2, [], 0)
    assert stamps(index) == {0: 3}


def test_extend_refuses_what_insert_does(index):
    index.insert(A, [0])
    lock = index.lookup(A, lock=True).lock
    for tokens, given in ((B, []), (B, [1, 2]), (B + C, [1, 1]), (B, [0])):
        with pytest.raises(PrefixIndexError):
            index.extend(lock, tokens, given)
    assert ids(index) == [0]
    for unknown in (lock + 1, 0, 10**12):
        with pytest.raises(LockError):
            index.extend(unknown, B, [1])


def test_two_locks_extend_apart(index):
    first, second = (index.lookup(A, lock=True).lock for _ in range(2))
    index.extend(first, A + B, [0, 1])
    entry = index.extend(second, A + C, [5, 2])
    assert (places(entry), entry.num_new_blocks) == ([(0, 0), (0, 2)], 1)
    assert {block: locks for _, block, *_, locks in rows(index.blocks())} == {0: 2, 1: 1, 2: 1}
    index.unlock(first)
    assert places(index.evict_lru(9)) == [(0, 1)]
