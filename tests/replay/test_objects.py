"""Object semantics: against LRU in six lines, and Belady's choice against an exhaustive search."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm import _core
from sagellm.core.errors import CapacityError, PolicyError
from sagellm.kv_policy.registry import policy_names
from sagellm.replay.belady import Belady
from sagellm.replay.generate import generate
from sagellm.replay.objects import replay_objects_reference
from sagellm.replay.policies import BELADY, find_contestant
from sagellm.replay.run import ReplayOptions, run
from tests.replay.policies import Arrival, Nothing, Recency

KEYS = st.lists(st.integers(0, 9), max_size=60).map(lambda keys: np.array(keys, np.uint64))


def lru(keys, capacity):
    cache, hits = {}, []
    for key in keys:
        hits.append(key in cache)
        cache[key] = cache.pop(key, None)
        if len(cache) > capacity:
            del cache[next(iter(cache))]
    return hits


def belady(keys, capacity, **options):
    policy = Belady(capacity, keys=keys, offsets=np.arange(len(keys) + 1))
    return replay_objects_reference(policy, keys, capacity=capacity, **options)


@settings(max_examples=150, deadline=None)
@given(KEYS, st.integers(1, 8))
def test_lru_in_six_lines(keys, capacity):
    counts = replay_objects_reference(Recency(capacity), keys, capacity=capacity)
    assert counts.hits.tolist() == lru(keys.tolist(), capacity)
    assert counts.num_evicted == max(0, (~counts.hits).sum() - capacity)


@settings(max_examples=100, deadline=None)
@given(KEYS, st.integers(1, 8))
def test_no_policy_beats_the_bound(keys, capacity):
    best = belady(keys, capacity).hits.sum()
    for kind in (Recency, Arrival):
        assert best >= replay_objects_reference(kind(capacity), keys, capacity=capacity).hits.sum()


def most_hits(keys, capacity):
    """By trying every victim."""
    states = {frozenset(): 0}
    for key in keys:
        following = {}
        for cache, hits in states.items():
            if key in cache:
                choices = [(cache, hits + 1)]
            elif len(cache) < capacity:
                choices = [(cache | {key}, hits)]
            else:
                choices = [((cache - {victim}) | {key}, hits) for victim in cache]
            for after, count in choices:
                following[after] = max(following.get(after, 0), count)
        states = following
    return max(states.values())


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=25), st.integers(1, 4))
def test_the_bound_is_reached(keys, capacity):
    assert belady(np.array(keys, np.uint64), capacity).hits.sum() == most_hits(keys, capacity)


@pytest.mark.parametrize(("soon", "expected"), [(1, 0), (2, 1), (None, 0)])
def test_evictions_that_came_back_soon(soon, expected):
    """Object 1 is evicted with the second access and comes back with the third, one access later, which evicts object 2."""
    counts = replay_objects_reference(Recency(1), np.array([1, 2, 1], np.uint64), capacity=1, soon=soon)
    assert counts.num_evicted == 2 and counts.num_evicted_soon == expected


@pytest.mark.parametrize("soon", [None, 3])
@pytest.mark.parametrize("name", sorted(set(policy_names()) - {BELADY}))
def test_native_counts_are_those_of_plain_python(name, soon):
    """The counts of evictions that came back soon are equal too. The hits are also those of the native flat cache."""
    trace = generate("zipf:requests=60,prefixes=20")
    native, plain = (
        run(
            trace, find_contestant(name, {}, reference=reference), 90, ReplayOptions(semantics="object", soon=soon)
        ).counts
        for reference in (False, True)
    )
    assert native.hits.tolist() == plain.hits.tolist() == _core.replay_objects(name, 90, trace.keys).tolist()
    assert (native.num_evicted, native.num_evicted_soon) == (plain.num_evicted, plain.num_evicted_soon)
    assert soon or native.num_evicted_soon > 0


def test_a_policy_without_victims_and_a_cache_without_room():
    with pytest.raises(PolicyError, match="gave 0 of 1 victims"):
        replay_objects_reference(Nothing(1), np.array([1, 2], np.uint64), capacity=1)
    with pytest.raises(CapacityError):
        replay_objects_reference(Recency(1), np.array([1], np.uint64), capacity=0)


def test_belady_names_its_reasons():
    policy = Belady(3, keys=np.array([1, 2, 3, 2, 1], np.uint64), offsets=np.array([0, 1, 2, 3, 4, 5]))
    from sagellm.kv_policy.base import CachedBlock, PolicyContext

    class Unpinned:
        def num_pins(self, key):
            return 0

        def parent_of(self, key):
            return None

    for index, key in enumerate((1, 2, 3)):
        policy.on_request(index)
        policy.on_insert(CachedBlock(key))
    decision = policy.select_victims(PolicyContext(3, Unpinned()))
    assert decision.victims == (3, 1, 2) and decision.reasons == ("never used again", "next use 4", "next use 3")
