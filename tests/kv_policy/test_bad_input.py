"""Tests of input that no policy takes, native or in Python: each raises PolicyError and goes on as if nothing had been."""

import math

import numpy as np
import pytest

from sagellm import _core
from sagellm.core.errors import PolicyError
from sagellm.kv_policy import CachedBlock, ReferenceObjectCache, make_policy, policy_names
from sagellm.kv_policy.arguments import RANGES
from sagellm.kv_policy.eviction.wtinylfu import CountMinSketch
from tests.kv_policy.flat import Flat

NAMES = [name for name in policy_names() if name != "belady"]
OPTIONS = {
    "s3fifo": ("small_ratio", "ghost_ratio", "move_to_main"), "twoq": ("in_ratio", "out_ratio"),
    "slru": ("protected_ratio",), "wtinylfu": ("window_ratio", "protected_ratio"),
    "prefix_reuse": ("half_life", "depth_weight"),
}  # fmt: skip
both = pytest.mark.parametrize("reference", [False, True], ids=["native", "twin"])


@both
@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_are_none(name, reference):
    flat = Flat(make_policy(name, 4, reference=reference)).insert(1)
    bad = [{"key": key} for key in (-1, 2**64, 1.5, "x", None, [])]
    bad += [{"key": 2, "parent": parent} for parent in (2, -1, "x")]
    bad += [{"key": 2, "depth": depth} for depth in (0, -1, 1.5, None, 2**31)]
    bad += [{"key": 2, what: value} for what in ("size_bytes", "cost_s") for value in (math.nan, math.inf, "x")]
    for attributes in bad:
        with pytest.raises(PolicyError):
            flat.policy.on_insert(CachedBlock(**attributes))
    for key in (-1, 2**64, "x", None, []):
        for event in (flat.policy.on_hit, flat.policy.on_remove):
            with pytest.raises(PolicyError):
                event(key)
    flat.insert(2)
    assert sorted(flat.victims(9)) == [1, 2]


@both
@pytest.mark.parametrize(("name", "option"), [(name, option) for name in OPTIONS for option in OPTIONS[name]])
def test_options_have_the_same_ranges(name, option, reference):
    low, high = RANGES[option]
    for good in (low, high, np.float32(1), 1.0):
        make_policy(name, 8, reference=reference, **{option: good})
    for bad in (low - 1, high * 1.001, math.nan, math.inf, True, "1", [1]):
        with pytest.raises(PolicyError):
            make_policy(name, 8, reference=reference, **{option: bad})


@both
def test_none_is_the_usual_half_life_and_no_other_option(reference):
    make_policy("prefix_reuse", 8, reference=reference, half_life=None)
    with pytest.raises(PolicyError):
        make_policy("prefix_reuse", 8, reference=reference, depth_weight=None)


@both
@pytest.mark.parametrize("capacity", [0, -1, 2**30 + 1, 10**20, 1.5, True, None])
def test_capacities(capacity, reference):
    with pytest.raises(PolicyError, match="a policy needs room"):
        make_policy("lru", capacity, reference=reference)


@both
@pytest.mark.parametrize("options", [{}, {"future": 3}])
def test_belady_needs_the_keys_to_come(options, reference):
    with pytest.raises(PolicyError):
        make_policy("belady", 8, reference=reference, **options)


@both
def test_parents_in_a_circle_end(reference):
    policy = make_policy("prefix_lru", 4, reference=reference)
    policy.on_insert(CachedBlock(1, 2, 2))
    policy.on_insert(CachedBlock(2, 1, 1))
    policy.on_insert(CachedBlock(3, 2, 2))


@pytest.mark.parametrize("name", ["arc", "s3fifo", "twoq"])
def test_what_was_noticed_and_never_comes_is_forgotten(name):
    """As many as there are places are remembered, by both; the one noticed last is among them."""
    for reference in (False, True):
        options = {"in_ratio": 0.0} if name == "twoq" else {}
        flat = Flat(make_policy(name, 10, reference=reference, **options))
        for key in range(300):
            flat.insert(key).remove(key)
            flat.ask(1, incoming=[key])
        flat.insert(0, 298, 299)
        reasons = dict(zip(*flat.ask(3)[::2], strict=True))
        better = {"arc": "frequent", "s3fifo": "main", "twoq": "Am"}[name]
        assert [key for key in (0, 298, 299) if reasons[key].startswith(better)] == [298, 299], reference


def test_the_sketch_of_a_huge_tier_is_bounded():
    assert CountMinSketch(2**30)._width == 2**22
    _core.ObjectCache("wtinylfu", 2**30).access(1)


@pytest.mark.parametrize("name", ["ObjectCache", "twin"])
def test_an_object_that_belady_did_not_foresee_takes_nobodys_place(name):
    future = [1, 2, 3]
    if name == "twin":
        cache = ReferenceObjectCache(make_policy("belady", 2, reference=True, future=future), 3)
    else:
        cache = _core.ObjectCache("belady", 2, {"future": future})
    cache.access(1), cache.access(2)
    with pytest.raises(PolicyError):
        cache.access(9)
    assert sorted(cache.keys()) == [1, 2] and len(cache) == 2 and 9 not in cache
    assert not cache.access(3)


def test_lists_of_keys_that_no_type_of_numpys_holds():
    for keys in ([2**64 - 1, 1, -1, 1], [-1, 2**64 - 1, 2**63, -(2**63)]):
        expected = ReferenceObjectCache(make_policy("lru", 3, reference=True), 3)
        hits = [expected.access(key % 2**64) for key in keys]
        assert _core.replay_objects("lru", 3, keys).tolist() == hits
    for keys in ([2**64], [1.5, 2**64 - 1], [-1, 2**64], [2**64 - 1, "x"]):
        with pytest.raises(PolicyError, match="keys are"):
            _core.replay_objects("lru", 3, keys)
