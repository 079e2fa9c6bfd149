"""Tests of the promises of `base.PrefixIndex` about `invalidate` and eviction; see test_contract.py."""

import itertools

import numpy as np
import pytest

from sagellm.core.errors import PrefixIndexError
from sagellm.prefix_reuse import RemovalReason
from tests.prefix_reuse.cases import (
    A,
    B,
    C,
    D,
    check_order,
    ids,
    places,
    removed,
    tree,
)

# invalidate


def test_a_sequence_goes_with_what_continues_it_and_what_only_led_to_it(index):
    index.insert(A + B + C + D, [0, 1, 2, 3])
    before = tree(index)
    gone = index.invalidate([*A, *B, *C, 9])
    assert removed(gone) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    check_order(gone, before)
    assert index.metrics()["removed_blocks"]["invalidated"] == 4


def test_the_blocks_above_stay_where_another_sequence_continues(index):
    index.insert(A + B + C, [0, 1, 2])
    index.insert(A + D, [0, 3])
    assert removed(index.invalidate(A + B + C)) == [(0, 1), (0, 2)]


def test_the_blocks_above_stay_where_an_entry_has_metadata(index):
    index.insert(A, [0], metadata={})
    index.insert(A + B + C, [0, 1, 2])
    assert removed(index.invalidate(A + B + C)) == [(0, 1), (0, 2)]
    assert removed(index.invalidate(A)) == [(0, 0)]


def test_the_blocks_above_stay_where_a_lock_holds_them(index):
    index.insert(A + B + C, [0, 1, 2])
    index.lookup(A, lock=True)
    assert removed(index.invalidate(A + B + C)) == [(0, 1), (0, 2)]


def test_an_entry_without_metadata_holds_nothing(index):
    index.insert(A, [0])
    index.insert(A + B, [0, 1])
    assert removed(index.invalidate(A + B)) == [(0, 0), (0, 1)]


def test_of_a_sequence_cached_in_part_the_part_goes(index):
    index.insert(A + B, [0, 1])
    assert removed(index.invalidate(A + B + C)) == [(0, 0), (0, 1)]


@pytest.mark.parametrize("hold", ["child", "metadata", "lock"])
def test_the_cached_part_stays_whole_if_something_needs_it(index, hold):
    index.insert(A + B, [0, 1], metadata={} if hold == "metadata" else None)
    if hold == "child":
        index.insert(A + B + D, [0, 1, 2])
    if hold == "lock":
        index.lookup(A + B, lock=True)
    assert len(index.invalidate(A + B + C)) == 0


@pytest.mark.parametrize("tokens", [[], [1], [9, 9], [9, 9, 1, 2]])
def test_what_is_not_cached_forgets_nothing(index, tokens):
    index.insert(A + B, [0, 1])
    assert len(index.invalidate(tokens)) == 0
    assert len(index.invalidate(A + B, "elsewhere")) == 0
    assert ids(index) == [0, 1]


def test_an_entry_is_forgotten_as_its_sequence(index):
    index.insert(A + B + C, [0, 1, 2])
    entry = index.lookup(A + B).entry_id
    assert removed(index.invalidate(entry_id=entry)) == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(PrefixIndexError):
        index.invalidate(entry_id=entry)


def test_given_blocks_go_with_all_below_and_unknown_ones_are_passed_over(index):
    index.insert(A + B + C, [0, 1, 2], tier="cpu")
    index.insert(A + D, [5, 3])
    assert removed(index.invalidate(kv_block_ids=[1, 9, 2, 1], tier="cpu")) == [(1, 1), (1, 2)]
    assert len(index.invalidate(kv_block_ids=[1, 2, 0], tier="nvme")) == 0
    assert removed(index.invalidate(kv_block_ids=[5])) == [(0, 3), (0, 5)]


def test_a_namespace_or_everything(index):
    for number, namespace in enumerate(["", "x", "y"]):
        index.insert(A + B, [2 * number, 2 * number + 1], namespace)
    assert removed(index.invalidate(namespace="x")) == [(0, 2), (0, 3)]
    assert removed(index.invalidate(namespace="")) == [(0, 0), (0, 1)]
    index.insert(A, [0])
    assert removed(index.invalidate()) == [(0, 0), (0, 4), (0, 5)]
    assert index.namespaces() == []


@pytest.mark.parametrize(
    "arguments",
    [
        dict(tokens=A, kv_block_ids=[0]),
        dict(tokens=A, entry_id=1),
        dict(kv_block_ids=[0], entry_id=1),
        dict(namespace="", kv_block_ids=[0]),
        dict(namespace="", entry_id=1),
    ],
)
def test_one_thing_is_forgotten_at_a_time(index, arguments):
    index.insert(A, [0])
    with pytest.raises(PrefixIndexError):
        index.invalidate(**arguments)
    assert ids(index) == [0]


# evict


def test_evict_lru_takes_what_hangs_below_on_other_tiers(index):
    index.insert(A + B + C, [0, 1, 2])
    index.move([1], [10], "gpu", "cpu")
    index.move([2], [20], "gpu", "nvme")
    index.insert(D, [3])
    before = tree(index)
    gone = index.evict_lru(1)
    assert places(gone) == [(2, 20), (1, 10), (0, 0)]
    check_order(gone, before)
    assert gone.on("gpu").tolist() == [0] and gone.on("cpu").tolist() == [10] and gone.on("nvme").tolist() == [20]
    counts = index.metrics()["removed_blocks"]
    assert (counts["evicted"], counts["orphaned"]) == (1, 2)


def test_evict_lru_of_more_than_there_is(index):
    index.insert(A + B, [0, 1])
    assert len(index.evict_lru(0)) == 0
    assert len(index.evict_lru(9, "cpu")) == 0
    assert places(index.evict_lru(10**9)) == [(0, 1), (0, 0)]
    assert len(index.evict_lru(1)) == 0


def test_a_block_of_the_tier_below_one_of_another_goes_first(index):
    index.insert(A + B + C, [0, 1, 2])
    index.move([1], [10], "gpu", "cpu")
    assert index.select_lru(2).tolist() == [2, 0]
    assert places(index.evict_lru(2)) == [(0, 2), (1, 10), (0, 0)]


def test_select_lru_is_what_evict_lru_removes(index):
    for number, path in enumerate(itertools.permutations([A, B, C])):
        index.insert(
            [*itertools.chain(*path)],
            [10 * number, 10 * number + 1, 10 * number + 2],
            tier="gpu" if number % 2 else "cpu",
        )
    index.lookup(A + B, lock=True)
    for tier, number in (("gpu", 4), ("cpu", 3), ("gpu", 99)):
        chosen = index.select_lru(number, tier)
        assert chosen.dtype == np.int32
        assert index.evict_lru(number, tier).on(tier).tolist() == chosen.tolist()


def test_evict_in_the_order_of_a_policy(index):
    index.insert(A + B, [0, 1])
    index.insert(C + D, [2, 3])
    assert places(index.evict([3, 1, 0, 2])) == [(0, 3), (0, 1), (0, 0), (0, 2)]
    assert index.metrics()["removed_blocks"]["policy"] == 4


def test_evict_mends_an_order_that_the_tree_does_not_allow(index):
    index.insert(A + B + C, [0, 1, 2])
    before = tree(index)
    gone = index.evict([0, 2, 1], reason=RemovalReason.INVALIDATED)
    assert removed(gone) == [(0, 0), (0, 1), (0, 2)]
    check_order(gone, before)
    assert index.metrics()["removed_blocks"]["invalidated"] == 3


def test_evict_needs_every_block_below_on_the_same_tier(index):
    index.insert(A + B + C, [0, 1, 2])
    for chosen in ([0], [1], [0, 1], [2, 0]):
        with pytest.raises(PrefixIndexError):
            index.evict(chosen)
        assert ids(index) == [0, 1, 2]
    index.move([1, 2], [10, 11], "gpu", "cpu")
    with pytest.raises(PrefixIndexError):
        index.evict([10], "cpu")
    assert removed(index.evict([0])) == [(0, 0), (1, 10), (1, 11)]
    assert index.metrics()["removed_blocks"]["orphaned"] == 2


@pytest.mark.parametrize("chosen", [[9], [0, 9], [0, 0]])
def test_evict_of_blocks_that_are_not_there_or_twice(index, chosen):
    index.insert(A, [0])
    with pytest.raises(PrefixIndexError):
        index.evict(chosen)
    assert ids(index) == [0]
