"""Tests of the promises of `base.PrefixIndex`, one by one, on every implementation. Blocks have two tokens unless stated."""

import inspect
import itertools

import pytest

from sagellm.core.errors import BlockReuseError, LockError
from sagellm.prefix_reuse import Namespace, PrefixIndex
from tests.prefix_reuse.cases import (
    A,
    B,
    C,
    D,
    check_order,
    ids,
    places,
    rows,
    stamps,
    tree,
)


def test_every_method_is_there(index_class):
    for name, method in inspect.getmembers(PrefixIndex, inspect.isfunction):
        if not name.startswith("_"):
            assert callable(getattr(index_class, name)), name
            wanted = list(inspect.signature(method).parameters)
            try:
                signature = inspect.signature(getattr(index_class, name))
            except ValueError:  # a native method has none that Python can see
                continue
            if "args" not in signature.parameters:
                assert list(signature.parameters) == wanted, name


# Terms


@pytest.mark.parametrize("block_size", [1, 2, 5, 16, 64])
def test_found_by_every_token(make, block_size):
    index = make(block_size)
    tokens = list(range(10, 10 + 4 * block_size))
    index.insert(tokens, [0, 1, 2, 3])
    for position in range(len(tokens)):
        other = tokens[:position] + [9] + tokens[position + 1 :]
        assert index.lookup(other).matched_length == position // block_size * block_size


def test_same_block_below_another_prefix_is_another(index):
    index.insert(A + C, [0, 1])
    assert index.insert(B + C, [2, 3]).num_new_blocks == 2
    assert index.lookup(C).matched_length == 0
    assert places(index.lookup(B + C)) == [(0, 2), (0, 3)]


def test_blocks_form_a_tree(index):
    index.insert(A + B + C, [0, 1, 2])
    index.insert(A + B + D, [0, 1, 3])
    index.insert(D, [4])
    parents = {block: parent for _, block, parent, *_ in rows(index.blocks())}
    assert parents == {0: -1, 1: 0, 2: 1, 3: 1, 4: -1}
    assert {block: depth for _, block, _, _, depth, _ in rows(index.blocks())} == {0: 2, 1: 4, 2: 6, 3: 6, 4: 2}


def test_an_id_names_one_block_a_tier(index):
    index.insert(A, [0], tier="gpu")
    index.insert(B, [0], tier="cpu")
    index.insert(C, [0], tier="nvme")
    assert {tier: ids(index, tier) for tier in ("gpu", "cpu", "nvme")} == {"gpu": [0], "cpu": [0], "nvme": [0]}
    for tier in ("gpu", "cpu", "nvme"):
        with pytest.raises(BlockReuseError):
            index.insert(D, [0], tier=tier)


# Recency


def test_every_touch_takes_the_next_tick_and_stamps_its_path(index):
    index.insert(A + B + C, [0, 1, 2])
    assert stamps(index) == {0: 1, 1: 1, 2: 1}
    lock = index.lookup(A + B, lock=True).lock
    assert stamps(index) == {0: 2, 1: 2, 2: 1}
    index.extend(lock, D, [3])
    assert stamps(index) == {0: 3, 1: 3, 2: 1, 3: 3}
    index.unlock(lock)
    assert stamps(index) == {0: 4, 1: 4, 2: 1, 3: 4}
    index.insert(A, [0])
    assert stamps(index) == {0: 5, 1: 4, 2: 1, 3: 4}


def test_what_touches_nothing_leaves_the_counter_alone(index):
    index.insert(A + B, [0, 1])
    before = rows(index.blocks())
    index.lookup(A + B, touch=False)
    index.lookup_tiers(A + B)
    index.select_lru(2)
    index.move([1], [7], "gpu", "cpu")
    index.move([7], [1], "cpu", "gpu")
    list(index.entries())
    assert rows(index.blocks()) == before
    index.insert(C, [2])
    assert stamps(index)[2] == 2


def test_an_empty_path_takes_a_tick_too(index):
    index.insert([], [])
    index.lookup(A)
    index.unlock(index.lookup(A, touch=False, lock=True).lock)
    index.insert(A, [0])
    assert stamps(index) == {0: 4}


def test_no_block_is_older_than_one_below_it(index):
    for path in itertools.product([A, B, C], repeat=3):
        tokens = [*itertools.chain(*path)]
        resident = index.lookup(tokens).kv_block_ids.tolist()
        fresh = 100 + index.num_blocks()
        index.insert(tokens, resident + list(range(fresh, fresh + 3 - len(resident))))
    found = {block: (parent, stamp) for _, block, parent, stamp, *_ in rows(index.blocks())}
    assert all(parent == -1 or found[parent][1] >= stamp for parent, stamp in found.values())


def test_eviction_takes_the_lowest_stamp_then_the_deepest(index):
    index.insert(A + B + C, [0, 1, 2])
    index.insert(D, [3])
    index.lookup(A)
    assert index.select_lru(9).tolist() == [2, 1, 3, 0]
    assert places(index.evict_lru(1)) == [(0, 2)]
    assert places(index.evict_lru(2)) == [(0, 1), (0, 3)]
    assert ids(index) == [0]


# Removal


@pytest.mark.parametrize("tiers", [("gpu", "gpu", "gpu"), ("gpu", "cpu", "nvme"), ("gpu", "nvme", "gpu")])
def test_removing_a_block_removes_all_below_it(index, tiers):
    index.insert(A + B + C, [0, 1, 2])
    index.insert(A + B + D, [0, 1, 3])
    for block, tier in enumerate(tiers):
        if tier != "gpu":
            index.move([block], [block], "gpu", tier)
    index.insert(D, [9])
    before = tree(index)
    gone = index.invalidate(kv_block_ids=[0])
    assert sorted(gone.kv_block_ids.tolist()) == [0, 1, 2, 3]
    check_order(gone, before)
    assert ids(index) == [9]


def test_a_locked_block_and_what_is_above_it_stays(index):
    index.insert(A + B + C, [0, 1, 2])
    lock = index.lookup(A + B, lock=True).lock
    assert places(index.evict_lru(9)) == [(0, 2)]
    for refused in (
        lambda: index.evict([1]),
        lambda: index.evict([0, 1]),
        lambda: index.invalidate(A + B),
        lambda: index.invalidate(A),
        lambda: index.invalidate(kv_block_ids=[0]),
        lambda: index.invalidate(kv_block_ids=[5, 1]),
        lambda: index.invalidate(namespace=""),
        lambda: index.invalidate(),
    ):
        with pytest.raises(LockError):
            refused()
        assert ids(index) == [0, 1]
    index.unlock(lock)
    assert places(index.evict_lru(9)) == [(0, 1), (0, 0)]


# Namespaces


def test_namespaces_share_nothing(index):
    index.insert(A + B, [0, 1], "x")
    assert index.lookup(A + B).matched_length == 0
    assert index.lookup(A + B, "x").matched_length == 4
    index.insert(A, [2], "y")
    assert sorted(index.namespaces()) == ["x", "y"]
    index.invalidate(namespace="y")
    assert index.namespaces() == ["x"]


def test_namespaces_have_different_keys():
    parts = ["", "a", "b", "1:a", "a0:", ":"]
    keys = [Namespace(*three).key for three in itertools.product(parts, repeat=3)]
    assert len(set(keys)) == len(keys)
    assert Namespace().key == ""


def test_a_namespace_and_its_key_are_the_same(index):
    tenant = Namespace(tenant="t", model="m")
    index.insert(A, [0], tenant)
    index.insert(B, [1], Namespace())
    assert index.lookup(A, tenant.key).matched_length == 2
    assert index.lookup(B).matched_length == 2
    assert sorted(index.namespaces()) == sorted(["", tenant.key])
