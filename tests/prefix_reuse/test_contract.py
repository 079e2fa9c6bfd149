"""What `base.PrefixIndex` promises, sentence by sentence, on every implementation. Blocks of two tokens unless said."""

import inspect
import itertools

import numpy as np
import pytest

from sagellm.core.errors import BlockReuseError, LockError, PrefixIndexError
from sagellm.prefix_reuse import Namespace, PrefixIndex
from sagellm.prefix_reuse.matcher import prefix_hashes
from tests.prefix_reuse.cases import (
    A,
    B,
    C,
    D,
    check_order,
    contents,
    ids,
    places,
    removed,
    rows,
    sequence,
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
