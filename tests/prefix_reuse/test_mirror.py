"""Events tell enough to keep a copy, and a copy that missed some knows it."""

import dataclasses

import numpy as np
import pytest

from sagellm.core.errors import PrefixIndexError
from sagellm.core.hooks import Tier
from sagellm.prefix_reuse import EventGap, PrefixEventKind, PrefixMirror, RemovalReason
from sagellm.prefix_reuse.matcher import prefix_hashes
from tests.prefix_reuse.cases import mirrored, tree

A, B, C, D = [1, 2], [3, 4], [5, 6], [7, 8]


@pytest.fixture
def mirror():
    return PrefixMirror()


def test_an_event_for_each_change(index):
    index.insert(A + B, [0, 1], "x")
    index.insert([*A, *B, *C, 9], [0, 1, 2], "x", tier="cpu")
    index.lookup(A, "x")
    index.move([0], [7], "gpu", "nvme")
    index.evict_lru(1, "cpu")
    index.clear()
    found = index.events()
    assert [event.sequence for event in found.events] == [1, 2, 3, 4, 5]
    assert (found.num_lost, found.last_sequence) == (0, 5)
    stored, longer, moved, gone, cleared = found.events

    assert (stored.kind, stored.namespace, stored.tier, stored.parent) == (PrefixEventKind.STORED, "x", Tier.GPU, None)
    assert (stored.kv_block_ids.tolist(), stored.token_ids.tolist(), stored.last_access) == ([0, 1], A + B, 1)
    assert stored.block_hashes.tolist() == prefix_hashes(A + B, 2).tolist()
    assert stored.kv_block_ids.dtype == stored.token_ids.dtype == np.int32 and stored.block_hashes.dtype == np.uint64

    assert (longer.kind, longer.tier, longer.parent) == (PrefixEventKind.STORED, Tier.CPU, (Tier.GPU, 1))
    assert (longer.kv_block_ids.tolist(), longer.token_ids.tolist(), longer.last_access) == ([2], C, 2)
    assert longer.block_hashes.tolist() == prefix_hashes(A + B + C, 2)[2:].tolist()

    assert (moved.kind, moved.namespace) == (PrefixEventKind.MOVED, "x")
    assert (moved.src_tier, moved.src_block_ids.tolist()) == (Tier.GPU, [0])
    assert (moved.tier, moved.kv_block_ids.tolist()) == (Tier.NVME, [7])

    assert (gone.kind, gone.reason, gone.tier) == (PrefixEventKind.REMOVED, RemovalReason.EVICTED, Tier.CPU)
    assert (gone.namespace, gone.kv_block_ids.tolist()) == ("x", [2])
    assert gone.block_hashes.tolist() == prefix_hashes(A + B + C, 2)[2:].tolist()
    assert cleared.kind is PrefixEventKind.CLEARED


def test_what_changes_no_block_is_no_event(index):
    index.insert(A + B, [0, 1])
    index.insert(A + B, [0, 1])
    index.unlock(index.lookup(A, lock=True).lock)
    index.lookup_tiers(A)
    index.invalidate(D)
    index.evict_lru(0)
    index.move([], [], "gpu", "cpu")
    assert index.events().last_sequence == 1


def test_only_what_came_later(index):
    for number in range(5):
        index.insert([number, 9], [number])
    assert [event.sequence for event in index.events(3).events] == [4, 5]
    assert index.events(5) == ((), 0, 5)
    assert index.events(99).events == ()


def test_events_that_are_gone_are_counted(make):
    index = make(event_capacity=3)
    for number in range(10):
        index.insert([number, 9], [number])
    found = index.events(2)
    assert [event.sequence for event in found.events] == [8, 9, 10]
    assert (found.num_lost, found.last_sequence) == (5, 10)
    assert index.events(7).num_lost == 0


def test_an_index_that_keeps_none_says_so(make):
    index = make(event_capacity=0)
    index.insert(A, [0])
    assert index.events().events == ()
    assert index.events().num_lost > 0


def test_a_mirror_holds_what_the_index_does(index, mirror):
    index.insert(A + B + C, [0, 1, 2])
    index.insert(A + D, [0, 3], tier="cpu")
    index.insert(D, [4], "x")
    assert mirror.catch_up(index) == 3
    assert mirrored(mirror) == tree(index)
    assert (mirror.sequence, mirror.num_resyncs, len(mirror)) == (3, 0, 5)
    block = next(block for block in mirror.blocks() if block.kv_block_id == 3)
    assert (block.namespace, block.tier, block.parent, block.depth) == ("", Tier.CPU, (Tier.GPU, 0), 4)
    assert (block.token_ids, block.last_access) == (tuple(D), 2)
    assert mirror.catch_up(index) == 0


def test_it_follows_every_change(index, mirror):
    changes = [
        lambda: index.insert(A + B + C, [0, 1, 2], tier="cpu"),
        lambda: index.insert(A + B, [5, 6]),
        lambda: index.insert(A + D, [5, 7], "x", tier="nvme"),
        lambda: index.extend(index.lookup(A + D, "x", lock=True).lock, B + C, [10, 11]),
        lambda: index.move([5, 6], [6, 5], "gpu", "gpu"),
        lambda: index.move([6], [20], "gpu", "cpu"),
        lambda: index.evict_lru(1, "cpu"),
        lambda: index.evict([20], "cpu"),
        lambda: index.insert(D + A, [30, 31], metadata={}),
        lambda: index.invalidate(D),
        lambda: index.insert(B, [40]),
        lambda: index.invalidate(kv_block_ids=[40]),
        lambda: index.clear(),
        lambda: index.insert(A, [0]),
    ]
    for change in changes:
        change()
        mirror.catch_up(index)
        assert mirrored(mirror) == tree(index)
    assert mirror.num_resyncs == 0


def test_ids_that_trade_places_within_and_between_namespaces(index, mirror):
    index.insert(A + B, [0, 1])
    index.insert(A + C, [0, 2])
    index.insert(A + D, [3, 4], "x")
    for new in ([1, 2, 3, 4, 0], [4, 3, 2, 1, 0], [0, 2, 1, 4, 3]):
        index.move([0, 1, 2, 3, 4], new, "gpu", "gpu")
        mirror.catch_up(index)
        assert mirrored(mirror) == tree(index)
    assert mirror.num_resyncs == 0


def test_lost_events_make_it_start_again_and_say_so(make, mirror):
    index = make(event_capacity=2)
    index.insert(A + B, [0, 1], metadata={"k": 1})
    mirror.catch_up(index)
    for number in range(5):
        index.insert([number, 9], [10 + number], "x")
    index.insert(A + C, [0, 2], tier="cpu")
    assert mirror.catch_up(index) == 0
    assert mirror.num_resyncs == 1
    assert mirrored(mirror) == tree(index)
    index.evict_lru(1)
    assert mirror.catch_up(index) == 1
    assert mirrored(mirror) == tree(index) and mirror.num_resyncs == 1
    stamps = {block.kv_block_id: block.last_access for block in mirror.blocks()}
    assert stamps[2] == stamps[0] == 7


def test_an_index_without_events_can_be_mirrored_still(make, mirror):
    index = make(event_capacity=0)
    for number in range(3):
        index.insert([number, 9], [number])
        mirror.catch_up(index)
        assert mirrored(mirror) == tree(index)
    assert mirror.num_resyncs == 3


def test_a_younger_index_is_taken_over(make, mirror):
    old, new = make(), make()
    for number in range(5):
        old.insert([number, 9], [number])
    mirror.catch_up(old)
    new.insert(A, [0])
    mirror.catch_up(new)
    assert (mirrored(mirror), mirror.num_resyncs, mirror.sequence) == (tree(new), 1, 1)


def test_a_restored_index_goes_on_where_it_was(make, mirror):
    index = make()
    index.insert(A + B, [0, 1])
    mirror.catch_up(index)
    copy = type(index).restore(index.snapshot(), event_capacity=10)
    copy.evict_lru(1)
    assert mirror.catch_up(copy) == 1
    assert mirrored(mirror) == tree(copy) and mirror.num_resyncs == 0
    fresh = PrefixMirror()
    fresh.catch_up(copy)
    assert mirrored(fresh) == tree(copy) and fresh.num_resyncs == 1


@pytest.mark.parametrize("shift", [-3, -1, 1, 5])
def test_a_gap_is_an_error(index, mirror, shift):
    index.insert(A, [0])
    index.insert(B, [1])
    index.insert(C, [2])
    first, second, third = index.events().events
    mirror.apply(first)
    mirror.apply(second)
    before = mirrored(mirror)
    with pytest.raises(EventGap) as caught:
        mirror.apply(dataclasses.replace(third, sequence=3 + shift))
    assert str(3 + shift) in str(caught.value) and "3" in str(caught.value)
    assert (mirrored(mirror), mirror.sequence) == (before, 2)
    mirror.apply(third)
    assert mirrored(mirror) == tree(index)
    assert issubclass(EventGap, PrefixIndexError)


@pytest.mark.parametrize("kind", ["stored", "removed", "moved"])
def test_an_event_of_another_index_is_an_error(make, mirror, kind):
    index = make()
    index.insert(A, [0])
    index.insert(A + B, [0, 1])
    index.move([1], [5], "gpu", "cpu")
    index.evict_lru(1, "cpu")
    wanted = {"stored": 1, "moved": 2, "removed": 3}[kind]
    event = index.events().events[wanted]
    with pytest.raises(EventGap):
        mirror.apply(dataclasses.replace(event, sequence=1))
    assert (mirrored(mirror), mirror.sequence) == ({}, 0)


def test_the_grouping_of_removals_does_not_matter(index, mirror):
    index.insert(A + B + C, [0, 1, 2])
    mirror.catch_up(index)
    template = index.events().events[0]
    removal = dataclasses.replace(
        template, kind=PrefixEventKind.REMOVED, reason=RemovalReason.EVICTED, token_ids=template.token_ids[:0]
    )
    for sequence, ids in ((2, [1]), (3, [0, 2])):
        mirror.apply(dataclasses.replace(removal, sequence=sequence, kv_block_ids=np.array(ids, np.int32)))
    assert mirrored(mirror) == {}


def test_match_is_what_a_lookup_would_find(index, mirror):
    index.insert(A + B + C, [0, 1, 2], "x")
    index.insert(A + D, [3, 4])
    mirror.catch_up(index)
    for namespace in ("", "x", "y"):
        for tokens in (A, A + B, A + D + C, [*A, *B, *C, 9], B, [], [1]):
            assert mirror.match(tokens, namespace) == index.lookup(tokens, namespace, touch=False).matched_length
