"""Events suffice to keep a copy, and a copy that missed some notices."""

import numpy as np
import pytest

from sagellm.core.errors import PrefixIndexError
from sagellm.core.hooks import Tier
from sagellm.prefix_reuse import (
    EventGap,
    PrefixChanges,
    PrefixEventKind,
    PrefixMirror,
    RemovalReason,
    changes_of,
    snapshot_of,
)
from sagellm.prefix_reuse.matcher import prefix_hashes
from tests.prefix_reuse.cases import mirrored

A, B, C, D = [1, 2], [3, 4], [5, 6], [7, 8]


@pytest.fixture
def mirror():
    return PrefixMirror(2)


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
    late = PrefixMirror(2)
    for number, change in enumerate(changes):
        change()
        mirror.catch_up(index)
        assert mirrored(mirror, index)
        if number % 5 == 4:  # the net of several events
            late.catch_up(index)
            assert mirrored(late, index)
    late.catch_up(index)
    assert mirrored(late, index) and (mirror.num_resyncs, late.num_resyncs) == (0, 0)
    assert len(mirror) == 1 and mirror.sequence == late.sequence == index.events().last_sequence


def test_lost_events_make_it_start_again_and_say_so(make, mirror):
    index = make(event_capacity=2)
    index.insert(A + B, [0, 1], metadata={"k": 1})
    mirror.catch_up(index)
    for number in range(5):
        index.insert([number, 9], [10 + number], "x")
    index.insert(A + C, [0, 2], tier="cpu")
    mirror.catch_up(index)
    assert mirror.num_resyncs == 1 and mirrored(mirror, index)
    index.evict_lru(1)
    mirror.catch_up(index)
    assert mirrored(mirror, index) and mirror.num_resyncs == 1


def test_an_index_without_events_can_be_mirrored_still(make, mirror):
    index = make(event_capacity=0)
    for number in range(3):
        index.insert([number, 9], [number])
        mirror.catch_up(index)
        assert mirrored(mirror, index)
    assert mirror.num_resyncs == 3


def test_a_younger_index_is_taken_over(make, mirror):
    old, new = make(), make()
    for number in range(5):
        old.insert([number, 9], [number])
    mirror.catch_up(old)
    new.insert(A, [0])
    mirror.catch_up(new)
    assert mirrored(mirror, new) and (mirror.num_resyncs, mirror.sequence) == (1, 1)


def test_a_restored_index_goes_on_where_it_was(make, mirror):
    index = make()
    index.insert(A + B, [0, 1])
    mirror.catch_up(index)
    copy = type(index).restore(index.snapshot(), event_capacity=10)
    copy.evict_lru(1)
    mirror.catch_up(copy)
    assert mirrored(mirror, copy) and mirror.num_resyncs == 0


def test_a_gap_is_an_error_and_a_snapshot_mends_it(index, mirror):
    index.insert(A, [0])
    first = changes_of(index, 0)
    index.insert(B, [1])
    second = changes_of(index, 1)
    index.evict_lru(1)
    third = changes_of(index, 2)
    mirror.apply(first)
    with pytest.raises(EventGap, match="got events 3 to 3, expected 2 and 0 hashes"):
        mirror.apply(third)
    assert (mirror.match(A), mirror.match(B), mirror.sequence) == (2, 0, 1)
    mirror.apply(snapshot_of(index))
    assert mirrored(mirror, index) and mirror.num_resyncs == 1
    for old in (second, third):  # they come late: the snapshot includes them
        mirror.apply(old)
    assert mirrored(mirror, index) and mirror.sequence == 3
    assert issubclass(EventGap, PrefixIndexError)


def test_a_removal_does_not_overtake_the_parts_of_a_snapshot(mirror):
    mirror.apply(PrefixChanges(7, 7, (1, 2), is_all=True, num_left=3))
    removal = PrefixChanges(7, 8, removed=(4,))
    with pytest.raises(EventGap, match="3 hashes of a snapshot"):
        mirror.apply(removal)
    mirror.apply(PrefixChanges(7, 7, (3, 4), num_left=1))
    with pytest.raises(EventGap):
        mirror.apply(removal)
    mirror.apply(PrefixChanges(7, 7, (5,)))
    mirror.apply(removal)
    assert set(mirror.index) == {1, 2, 3, 5} and mirror.sequence == 8


def test_match_is_what_a_lookup_would_find(index, mirror):
    index.insert(A + B + C, [0, 1, 2], "x")
    index.insert(A + D, [3, 4])
    mirror.catch_up(index)
    for namespace in ("", "x", "y"):
        for tokens in (A, A + B, A + D + C, [*A, *B, *C, 9], B, [], [1]):
            assert mirror.match(tokens, namespace) == index.lookup(tokens, namespace, touch=False).matched_length
