"""Tests of the promises of `base.PrefixIndex` about moving blocks and reporting what is cached; see test_contract.py."""


import numpy as np
import pytest

from sagellm.core.errors import BlockReuseError, LockError, PrefixIndexError
from sagellm.prefix_reuse import RemovalReason
from tests.prefix_reuse.cases import A, B, C, D, contents, ids, places, rows, stamps

# move


def test_move_changes_places_alone(index):
    index.insert(A + B + C, [0, 1, 2])
    index.insert(D, [3])
    lock = index.lookup(A, lock=True).lock
    index.move([0, 2], [1, 0], "gpu", "cpu")
    assert places(index.lookup(A + B + C, touch=False)) == [(1, 1), (0, 1), (1, 0)]
    assert rows(index.blocks()) == [(0, 1, 1, 1, 4, 0), (0, 3, -1, 2, 2, 0), (1, 0, 1, 1, 6, 0), (1, 1, -1, 3, 2, 1)]
    assert not any(index.metrics()["removed_blocks"].values())
    index.unlock(lock)


def test_moved_blocks_keep_their_turn(index):
    index.insert(A, [0])
    index.insert(B, [1], tier="cpu")
    index.insert(C, [2])
    index.move([0, 2], [10, 12], "gpu", "cpu")
    assert index.select_lru(9, "cpu").tolist() == [10, 1, 12]
    index.move([1], [5], "cpu", "nvme")
    assert index.select_lru(9, "cpu").tolist() == [10, 12]


def test_ids_may_trade_places_within_a_tier(index):
    index.insert(A + B, [0, 1])
    index.insert(C, [2], "x")
    index.move([0, 1, 2], [1, 2, 0], "gpu", "gpu")
    assert places(index.lookup(A + B)) == [(0, 1), (0, 2)]
    assert places(index.lookup(C, "x")) == [(0, 0)]


@pytest.mark.parametrize(
    "moved, new, error",
    [
        ([0], [1, 2], PrefixIndexError),
        ([9], [1], PrefixIndexError),
        ([0, 9], [5, 6], PrefixIndexError),
        ([0, 0], [5, 6], PrefixIndexError),
        ([0, 1], [5, 5], BlockReuseError),
        ([0], [3], BlockReuseError),
    ],
)
def test_a_move_that_cannot_be(index, moved, new, error):
    index.insert(A + B, [0, 1])
    index.insert(C, [3], tier="cpu")
    before = rows(index.blocks())
    with pytest.raises(error):
        index.move(moved, new, "gpu", "cpu")
    with pytest.raises(PrefixIndexError):
        index.move([0], [1], "gpu", "gpu")
    assert rows(index.blocks()) == before


def test_moving_nothing(index):
    index.insert(A, [0])
    index.move([], [], "gpu", "cpu")
    assert ids(index, "gpu") == [0]


# Reading


def test_columns_of_blocks(index):
    index.insert(A + B, [0, 1])
    index.move([0], [7], "gpu", "cpu")
    blocks = index.blocks()
    assert [column.dtype for column in blocks] == [np.int64, np.int8, np.int64, np.int64, np.int64, np.int64]
    assert rows(blocks) == [(0, 1, 7, 1, 4, 0), (1, 7, -1, 1, 2, 0)]
    assert rows(index.blocks("gpu")) == [(0, 1, -1, 1, 4, 0)]
    assert len(index.blocks("nvme").kv_block_ids) == 0
    index.lookup(A, lock=True)
    assert rows(index.blocks(unlocked=True)) == [(0, 1, -1, 1, 4, 0)]


def test_contains(index):
    index.insert(A + B, [3, 5], tier="cpu")
    found = index.contains([3, 4, 5, 3, 2**31 - 1], "cpu")
    assert found.dtype == np.bool_ and found.tolist() == [True, False, True, True, False]
    assert index.contains([3, 5]).tolist() == [False, False]
    assert index.contains([]).tolist() == []


def test_entry_and_tokens(index):
    index.insert(A + B, [0, 1], "x", metadata={"k": 1})
    hit = index.lookup(A + B, "x")
    entry = index.entry(hit.entry_id)
    assert (entry.token_length, places(entry), entry.metadata) == (4, [(0, 0), (0, 1)], {"k": 1})
    assert (entry.num_new_blocks, entry.replaced) == (0, None)
    tokens = index.tokens(hit.entry_id)
    assert tokens.dtype == np.int32 and tokens.tolist() == A + B
    index.evict_lru(1)
    for ask in (index.entry, index.tokens):
        with pytest.raises(PrefixIndexError):
            ask(hit.entry_id)


def test_entry_ids_are_never_given_out_twice(index):
    seen = set()
    for _ in range(20):
        entry = index.insert(A, [0]).entry_id
        assert entry not in seen
        seen.add(entry)
        index.evict_lru(1)
    longer = index.insert(A + B, [0, 1]).entry_id
    index.evict_lru(1)
    assert index.lookup(A).entry_id not in seen | {longer}


def test_an_entry_id_never_names_another_prefix(index):
    first = index.insert(A, [0]).entry_id
    index.insert(A + B, [0, 1])
    index.evict_lru(1)
    index.insert(A + C, [0, 1])
    try:
        assert index.tokens(first).tolist() == A
    except PrefixIndexError:
        assert index.lookup(A).entry_id != first


def test_entries_are_the_longest_prefixes(index):
    index.insert(A, [0])
    index.insert(A + B, [0, 1], metadata={"k": 1})
    index.insert(A + C, [0, 2])
    index.insert(D, [3], "x")
    assert contents(index) == {
        "": [(A + B, [(0, 0), (0, 1)], {"k": 1}), (A + C, [(0, 0), (0, 2)], None)],
        "x": [(D, [(0, 3)], None)],
    }
    assert len(list(index.entries())) == 3
    assert list(index.entries("nowhere")) == []


def test_num_blocks(index):
    index.insert(A + B, [0, 1])
    index.insert(C, [0], tier="nvme")
    assert [index.num_blocks(tier) for tier in (None, "gpu", "cpu", "nvme")] == [3, 2, 0, 1]


def test_clear(index):
    index.insert(A + B, [0, 1], metadata={"k": 1})
    entry = index.insert(C, [2], "x").entry_id
    lock = index.lookup(A, lock=True).lock
    index.clear()
    assert (index.num_blocks(), index.namespaces(), index.metrics()["locks"]) == (0, [], 0)
    with pytest.raises(LockError):
        index.unlock(lock)
    with pytest.raises(PrefixIndexError):
        index.entry(entry)
    index.insert(A, [0])
    assert stamps(index) == {0: 4}
    assert index.lookup(A).entry_id != entry
    assert index.entry(index.lookup(A).entry_id).metadata is None


def test_memory_grows_with_what_is_held(make):
    index = make(16)
    before = index.memory_bytes()
    index.insert(list(range(16 * 1000)), list(range(1000)))
    assert index.memory_bytes() - before > 16 * 1000 * 4


def test_counters(index):
    index.insert(A + B, [0, 1])
    index.insert([*A, *C, 9], [0, 2])
    lock = index.lookup([*A, 9], lock=True).lock
    index.extend(lock, D, [3])
    index.lookup(D, touch=False)
    index.lookup([])
    index.evict_lru(1)
    counters = index.metrics()
    expected = dict(
        lookups=3, hits=1, query_tokens=5, matched_tokens=2, inserts=3, inserted_tokens=10, new_blocks=4, locks=1
    )
    assert {name: counters[name] for name in expected} == expected
    assert counters["blocks"] == {"gpu": 3, "cpu": 0, "nvme": 0}
    assert counters["removed_blocks"] == dict.fromkeys([r.value for r in RemovalReason], 0) | {"evicted": 1}
    assert counters["memory_bytes"] == index.memory_bytes()
    assert all(bound >= 0 and count > 0 for bound, count in counters["latency_ns"])
