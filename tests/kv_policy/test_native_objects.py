"""The flat cache in C++: what must always hold, which keys and options it takes. Its decisions: `test_native_and_twin`."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sagellm import _core
from sagellm.core.errors import PolicyError
from tests.kv_policy.access import zipf

NAMES = _core.policy_names()


def options(name: str, keys: np.ndarray) -> dict:
    return {"future": keys} if name == "belady" else {}


@pytest.mark.parametrize("name", NAMES)
def test_books_of_the_cache_are_right_at_every_step(name: str):
    keys = zipf(5, 1500, 80)
    for capacity in (1, 6, 30):
        cache, inside = _core.ObjectCache(name, capacity, options(name, keys)), set()
        for key in keys.tolist():
            assert (key in cache) == (key in inside)
            assert cache.access(key) == (key in inside)
            found = cache.keys().tolist()
            assert len(found) == len(set(found)) == len(cache) <= capacity
            assert set(found) <= inside | {key} and key in cache
            assert len(inside | {key}) - len(found) == (len(inside) == capacity and key not in inside)
            inside = set(found)
        assert cache.num_evicted == sum(~_core.replay_objects(name, capacity, keys)) - len(cache)


@pytest.mark.parametrize("name", NAMES)
def test_in_one_call_or_in_many(name: str):
    keys = zipf(6, 4000, 200)
    whole = _core.replay_objects(name, 40, keys)
    cache = _core.ObjectCache(name, 40, options(name, keys))
    parts = np.concatenate([cache.access_many(part) for part in np.array_split(keys, 7)])
    assert whole.dtype == np.bool_ and np.array_equal(whole, parts)


def test_belady_is_the_bound():
    keys = zipf(7, 5000, 200)
    best = _core.replay_objects("belady", 30, keys).sum()
    hits = {name: int(_core.replay_objects(name, 30, keys).sum()) for name in NAMES}
    assert max(hits.values()) == hits["belady"] == best
    assert len(set(hits.values())) > 9  # they are different policies


def test_a_scan_does_not_empty_what_resists_it():
    hot = np.tile(np.arange(8), 60)
    keys = np.concatenate([hot, np.arange(1000, 1400), hot])
    after = {name: _core.replay_objects(name, 20, keys)[-len(hot) : -len(hot) + 8].sum() for name in NAMES}
    assert after["lru"] == after["fifo"] == 0
    assert after["lfu"] == after["arc"] == after["slru"] == after["belady"] == 8
    assert after["wtinylfu"] > 5  # 400 keys share a sketch of 32 counters a row


def test_keys_are_integers_of_64_bits():
    cache = _core.ObjectCache("lru", 4)
    assert [cache.access(key) for key in (2**64 - 1, -1, np.int64(-1), -(2**63), 2**63, True, 1)] == [
        False, True, True, False, True, False, True,
    ]  # fmt: skip
    assert cache.access_many(np.array([-1, 5, 5], np.int64)).tolist() == [True, False, True]
    assert cache.access_many(np.array([5, 6], ">i4")).tolist() == [True, False]
    assert cache.access_many([6, 7]).tolist() == [True, False]
    assert cache.access_many(np.arange(20, dtype=np.uint64)[5:8:2]).tolist() == [True, True]
    assert cache.access_many([]).tolist() == []
    for key in (2**64, -(2**63) - 1):
        with pytest.raises(PolicyError, match="a key must be a 64-bit integer"):
            cache.access(key)
    for key in (1.0, "1", None):
        with pytest.raises(TypeError):
            cache.access(key)
    for keys in ([1.5], np.zeros((2, 2), int), [[1], [2, 3]], "ab", np.array([True])):
        with pytest.raises(PolicyError, match="keys are .*; they must be a one-dimensional array or list of integers"):
            cache.access_many(keys)


def test_one_thread_at_a_time():
    keys = zipf(1, 400_000, 5000)
    cache = _core.ObjectCache("lru", 1000)

    def work(_):
        try:
            cache.access_many(keys)
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as threads:
        seen = list(filter(None, threads.map(work, range(3))))
    assert all("another thread uses this ObjectCache" in words for words in seen)
    assert len(cache) == 1000 == len(set(cache.keys().tolist()))


@pytest.mark.parametrize(
    ("name", "capacity", "given", "words"),
    [
        ("best", 3, {}, "policy 'best' is unknown; known are fifo, lru, lfu, arc, "),
        ("lru", 0, {}, "capacity 0: a policy needs room for 1 to 1073741824 blocks"),
        ("lru", 1 << 31, {}, "a policy needs room for 1 to"),
        ("lru", 3, {"small_ratio": 0.1}, "policy lru has no options small_ratio"),
        ("s3fifo", 3, {"small_ratio": 1.1}, "policy s3fifo: small_ratio 1.1; allowed are 0 to 1"),
        ("s3fifo", 3, {"move_to_main": 1.5}, "policy s3fifo: move_to_main must be a whole number"),
        ("slru", 3, {"protected_ratio": -0.1}, "protected_ratio -0.1; allowed are 0 to 1"),
        ("prefix_reuse", 3, {"half_life": 0}, "half_life 0; allowed are"),
        ("prefix_reuse", 3, {"half_life": float("nan")}, "option half_life is nan; it must be a number"),
        ("twoq", 3, {"in_ratio": "much"}, "option in_ratio is 'much'; it must be a number"),
        ("twoq", 3, {"in_ratio": True}, "option in_ratio is True; it must be a number"),
        ("belady", 3, {}, "policy belady needs the option future"),
        ("belady", 3, {"future": [[1]]}, "future are of 2 dimensions"),
    ],
)
def test_bad_arguments_are_told(name: str, capacity: int, given: dict, words: str):
    with pytest.raises(PolicyError, match=words):
        _core.ObjectCache(name, capacity, given)
    with pytest.raises(PolicyError, match=words):
        _core.NativePolicy(name, capacity, given)


def test_belady_sees_that_it_was_told_another_future():
    cache = _core.ObjectCache("belady", 1, {"future": [1, 2, 1]})
    assert not cache.access(1)
    with pytest.raises(PolicyError, match="event 1 is of key 3, foreseen was key 2"):
        cache.access(3)
    assert not cache.access(2) and not cache.access(1) and len(cache) == 1
    with pytest.raises(PolicyError, match="event 3 is of key 1, foreseen was the end"):
        cache.access(1)
