"""The plain policies against even plainer ones, request by request; each rule by hand, on both forms of a policy."""

import itertools
import random
from functools import partial

import numpy as np
import pytest

from sagellm.core.errors import PolicyError
from sagellm.kv_policy import ReferenceObjectCache, make_policy, policy_names
from sagellm.kv_policy.base import CachedBlock, EvictionDecision, EvictionPolicy
from tests.kv_policy.access import zipf
from tests.kv_policy.by_the_paper import OTHERS, RANKS, BruteForce
from tests.kv_policy.flat import Flat

NAMES = [name for name in policy_names() if name != "belady"]


@pytest.fixture(params=[False, True], ids=["native", "twin"])
def make(request):
    return partial(make_policy, reference=request.param)


def plain_hits(name, capacity, keys):
    return ReferenceObjectCache(make_policy(name, capacity, reference=True), capacity).access_many(keys).tolist()


@pytest.mark.parametrize("capacity", [1, 2, 5, 64])
@pytest.mark.parametrize("name", RANKS)
def test_equal_to_brute_force(name, capacity):
    keys = zipf(capacity, 3000, 300).tolist()
    expected = BruteForce(capacity, RANKS[name])
    assert plain_hits(name, capacity, keys) == [expected.access(key) for key in keys]


@pytest.mark.parametrize(
    ("name", "capacity"),
    [*itertools.product(OTHERS, (1, 2, 3, 10, 64)), ("wtinylfu", 220), ("slru", 220), ("arc", 220)],
)
def test_equal_to_the_paper(name, capacity):
    keys = zipf(capacity, 3000, 300).tolist()
    assert plain_hits(name, capacity, keys) == OTHERS[name](capacity, keys)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("arc", "s3fifo", "twoq", "wtinylfu")])
def test_many_at_once_are_those_that_come_one_by_one(make, name):
    """A question for n is n questions for one, each followed by the removal, where no sizes of queues decide."""
    chance = random.Random(5)
    at_once, one_by_one = (Flat(make(name, 24)) for _ in range(2))
    for _ in range(400):
        key = chance.randrange(90)
        if key in at_once.pins:
            at_once.hit(key)
            one_by_one.hit(key)
            continue
        wanted = chance.randint(1, 6)
        coming = [key] + [other for other in chance.sample(range(90), 5) if other not in at_once.pins and other != key]
        coming = coming[:wanted]
        if len(at_once.pins) + len(coming) > 24:
            victims = at_once.evict(len(coming), coming)
            assert victims == [victim for other in coming for victim in one_by_one.evict(1, [other])]
        at_once.insert(*coming)
        one_by_one.insert(*coming)


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_goes_leaf_first_and_held_blocks_stay(make, name):
    flat = Flat(make(name, 8)).chain(1, 2, 3, 4).insert(10, depth=1)
    flat.pin(2)  # a request holds the first two
    flat.pin(1)
    assert sorted(flat.victims(5)) == [3, 4, 10]
    flat.unpin(1, 2)
    victims = flat.victims(5)
    assert [victim for victim in victims if victim != 10] == [4, 3, 2, 1]


@pytest.mark.parametrize("name", NAMES)
def test_a_block_that_was_passed_over_goes_as_soon_as_it_may(make, name):
    flat = Flat(make(name, 8)).chain(1, 2, 3, 4, root_first=True)
    assert flat.victims(3) == [4, 3, 2]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_give(make, name):
    flat = Flat(make(name, 3))
    assert flat.victims(2) == []
    assert flat.insert(1, 2).pin(1, 2).victims(2) == [] and flat.ask(0).victims == ()


@pytest.mark.parametrize(
    ("name", "prepare", "reasons"),
    [
        ("fifo", lambda flat: flat.insert(1, 2), ["inserted first"]),
        ("lru", lambda flat: flat.insert(1, 2).hit(1), ["least recently used"]),
        ("lfu", lambda flat: flat.insert(1, 2).hit(1, 1, 2), ["used 2 times", "used 3 times"]),
        ("arc", lambda flat: flat.insert(1, 2).hit(2), ["recent list, target 0.000", "frequent list, target 0.000"]),
        ("s3fifo", lambda flat: flat.insert(*range(12)), ["small queue"]),
        ("sieve", lambda flat: flat.insert(1, 2).hit(1), ["not visited"]),
        ("twoq", lambda flat: flat.insert(1), ["A1in"]),
        ("slru", lambda flat: flat.insert(1, 2).hit(1), ["probation", "protected"]),
        ("wtinylfu", lambda flat: flat.insert(1, 2).hit(1, 1), ["window, estimate 1", "protected, estimate 3"]),
        ("gdsf", lambda flat: flat.insert(1, size_bytes=3, cost_s=2.0), ["priority 0.666667"]),
        ("prefix_lru", lambda flat: flat.insert(1), ["oldest leaf"]),
        ("prefix_depth", lambda flat: flat.insert(1, depth=7), ["depth 7"]),
        ("prefix_reuse", lambda flat: flat.insert(1, depth=4), ["score -0.484375"]),
    ],
)  # fmt: skip
def test_reasons_are_numbers_in_words(make, name, prepare, reasons):
    flat = prepare(Flat(make(name, 16)))
    assert list(flat.ask(len(reasons)).reasons) == reasons


def test_lfu_counts_from_one_again_after_an_eviction(make):
    flat = Flat(make("lfu", 3)).insert(1, 2).hit(1, 1).remove(1).insert(1).hit(2)
    assert flat.victims(2) == [1, 2]


def test_arc_learns_from_ghosts_when_it_is_asked_or_else_at_the_insertion(make):
    for incoming in ([1], []):
        flat = Flat(make("arc", 4)).insert(1, 2, 3, 4).hit(2, 3, 4)
        flat.evict(1, [5])
        flat.insert(5)
        flat.evict(1, incoming)
        flat.insert(1)
        assert flat.ask(2).reasons[0].endswith("target 1.000"), incoming


def test_an_invalidated_block_leaves_no_ghost(make):
    for name, reason in (("arc", "recent"), ("twoq", "A1in"), ("s3fifo", "small")):
        flat = Flat(make(name, 20))
        flat.ask(1)
        flat.insert(1).remove(1, evicted=False).insert(1)
        assert flat.ask(1).reasons[0].startswith(reason), name
        flat.remove(1, evicted=True).insert(1)  # an eviction does leave one
        assert not flat.ask(1).reasons[0].startswith(reason), name


def test_arc_adapts_once_to_a_ghost(make):
    flat = Flat(make("arc", 3)).insert(1, 2, 3).hit(3)
    assert flat.evict(1, [4]) == [1]
    flat.insert(4)
    for _ in range(2):
        assert (flat.victims(1, [1]), flat.ask(1, [1]).reasons[0]) == ([2], "recent list, target 1.000")
    flat.remove(2).insert(1)
    assert (flat.victims(1, [9]), flat.ask(1, [9]).reasons[0]) == ([3], "frequent list, target 1.000")


def test_arc_passes_over_what_is_held_to_the_other_list(make):
    flat = Flat(make("arc", 4)).insert(1, 2, 3).hit(3).pin(1, 2)
    assert list(flat.ask(1).reasons) == ["frequent list, target 0.000"]
    assert flat.unpin(1).victims(2) == [1, 3]


def test_sieve_keeps_marks_and_place_of_what_is_held(make):
    flat = Flat(make("sieve", 4)).insert(1, 2, 3, 4).hit(1).pin(1)
    assert flat.evict() == [2] and flat.evict() == [3]  # the hand has passed the held one and left its mark
    flat.unpin(1).hit(4)
    assert flat.evict() == [4]  # round again: the marks of 4 and 1 go, then 4 is first without one


def test_s3fifo_keeps_what_is_held_in_its_place(make):
    flat = Flat(make("s3fifo", 20))
    flat.ask(1)
    flat.insert(1, 2, 3).hit(1, 1).pin(1)
    assert flat.evict() == [2]
    flat.unpin(1)
    assert list(flat.ask(1).reasons) == ["small queue"] and flat.victims() == [3]  # 1 has gone to main for its two hits
    flat.remove(3)
    assert list(flat.ask(1).reasons) == ["main queue"]


def test_s3fifo_fills_main_until_it_is_first_asked(make):
    flat = Flat(make("s3fifo", 10, small_ratio=0.2)).insert(1, 2, 3, 4)
    assert list(flat.ask(4).reasons) == ["small queue", "small queue", "main queue", "main queue"]
    flat.insert(5, 6, 7)
    assert flat.ask(7).reasons.count("small queue") == 5


def test_s3fifo_main_goes_round_once_for_each_hit_up_to_three(make):
    flat = Flat(make("s3fifo", 4, small_ratio=0.0)).insert(1, 2, 3, 4).hit(*[1] * 9, *[2] * 4, 3)
    assert flat.evict() == [4]  # 1 and 2 have two rounds left, and not eight and three
    assert flat.evict() == [3] and flat.evict() == [1]


def test_slru_demotes_beyond_its_share(make):
    flat = Flat(make("slru", 4, protected_ratio=0.5)).insert(1, 2, 3, 4).hit(4, 1, 2)
    assert flat.victims(4) == [3, 4, 1, 2] and list(flat.ask(4).reasons) == ["probation"] * 2 + ["protected"] * 2


def test_wtinylfu_lets_only_the_more_used_in(make):
    flat = Flat(make("wtinylfu", 4, window_ratio=0.25)).insert(1, 2, 3, 4).hit(1, 2, 3)
    assert flat.evict(1, [5]) == [4]  # in the window, used once, against 1, used twice
    flat.insert(5).hit(5, 5)
    assert flat.evict(1, [6]) == [1]  # now the window's is used more; it moves on
    assert flat.ask(1).reasons[0].startswith("probation")
    flat.insert(6)
    assert flat.ask(1).reasons[0].startswith("window")


def test_gdsf_inflation_lets_what_is_not_used_fall_behind(make):
    flat = Flat(make("gdsf", 4)).insert(1).hit(1, 1).insert(2)
    for key in range(3, 7):
        assert flat.evict() == [key - 1]
        flat.insert(key)
    assert flat.victims() == [1]  # its 3 is what the last one reached too, and was computed first
    cheap_or_large = (
        Flat(make("gdsf", 4)).insert(1, cost_s=1.0).insert(2, cost_s=5.0).insert(3, cost_s=5.0, size_bytes=10)
    )
    assert cheap_or_large.victims(3) == [3, 1, 2]
    sizes = Flat(make("gdsf", 9)).insert(1, size_bytes=4, cost_s=2.0).insert(2, size_bytes=0)  # no size counts as 1
    assert list(sizes.ask(2).reasons) == ["priority 0.5", "priority 1"]


def test_prefix_lru_counts_a_new_branch_as_a_use_of_all_above_it(make):
    flat = Flat(make("prefix_lru", 8)).insert(1, 2)
    flat.policy.on_insert(CachedBlock(3, 1, 2))
    flat.pins[3] = 0
    assert flat.victims(3) == [2, 3, 1]  # 1 and 3 have one stamp: the deeper one goes first


def test_prefix_reuse_weighs_uses_depth_and_age(make):
    flat = Flat(make("prefix_reuse", 8, half_life=1000, depth_weight=0.0)).insert(1, 2).hit(1).insert(3)
    assert flat.victims(3) == [2, 3, 1]
    flat = Flat(make("prefix_reuse", 8, half_life=1000, depth_weight=1.0)).insert(1, depth=2).insert(2, depth=64)
    assert flat.victims(2) == [2, 1]
    flat = Flat(make("prefix_reuse", 8, half_life=0.5)).insert(1).hit(1, 1).insert(2, 3, 4)
    assert flat.victims(1) == [1]  # with so short a memory it is LRU


def test_belady_says_when_the_future_does_not_come(make):
    flat = Flat(make("belady", 2, future=[1, 2, 1])).insert(1, 2)
    assert list(flat.ask(2).reasons) == ["never used again", "next use 2"]
    with pytest.raises(PolicyError, match="event 2 is .* 2, (foretold was|foreseen was key) 1"):
        flat.hit(2)
    flat.hit(1)
    with pytest.raises(PolicyError, match="was the end"):
        flat.hit(1)


def test_the_object_cache_counts_and_refuses_a_policy_that_gives_nothing():
    cache = ReferenceObjectCache(make_policy("fifo", 2, reference=True), 2)
    assert [cache.access(key) for key in (1, 2, 1, 3)] == [False, False, True, False]
    assert cache.keys() == [2, 3] and len(cache) == 2 and 1 not in cache and cache.num_evicted == 1
    assert cache.access_many(np.array([2, 9], dtype=np.uint64)).tolist() == [True, False]

    class Miser(EvictionPolicy):
        name = "miser"
        on_insert = on_hit = on_remove = lambda self, *arguments, **named: None

        def select_victims(self, context):
            return EvictionDecision((), "mine", ())

    with pytest.raises(PolicyError, match="miser gave no victim of 1 objects"):
        ReferenceObjectCache(Miser(1), 1).access_many([1, 2])
