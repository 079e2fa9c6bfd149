"""Nonsense, extremes and unusual arrays: an error that helps, or the right answer; never a change in between."""

import array
from contextlib import suppress
from fractions import Fraction

import numpy as np
import pytest

from sagellm.core.errors import BlockReuseError, LockError, PrefixIndexError
from sagellm.prefix_reuse import Namespace, PrefixReuseIndex, ReferencePrefixIndex
from sagellm.prefix_reuse import prefix_hashes as native_prefix_hashes
from sagellm.prefix_reuse.matcher import prefix_hashes
from tests.prefix_reuse.cases import int32, places, rows

A, B = [1, 2], [3, 4]
HUGE = 2**31 - 1

NO_TOKENS = {
    "negative": [1, -2],
    "negative int32": int32([1, -2]),
    "negative int64": np.array([1, -2]),
    "beyond int32": [1, 2**31],
    "beyond int32, int64": np.array([1, 2**32 + 5]),
    "beyond int32, uint32": np.array([1, 2**31], dtype=np.uint32),
    "beyond int64": np.array([1, 2**63], dtype=np.uint64),
    "beyond everything": [1, 2**70],
    "floats": [1.0, 2.0],
    "float array": np.array([1.0, 2.0]),
    "no number": [float("nan"), 1],
    "bools": [True, False],
    "bool array": np.array([True, False]),
    "objects": np.array([1, 2], dtype=object),
    "strings": ["1", "2"],
    "a string": "12",
    "bytes": b"12",
    "complex": [1j, 2],
    "fractions": [Fraction(1, 2), 1],
    "times": np.array([1, 2], dtype="datetime64[s]"),
    "nothing": [None, 1],
    "two dimensions": [[1, 2]],
    "two dimensions, array": np.ones((2, 2), dtype=np.int32),
    "no dimension": np.int32(3),
    "a number": 7,
    "ragged": [[1], [2, 3]],
    "a set": {1, 2},
    "a dict": {1: 2},
    "a generator": (token for token in [1, 2]),
    "an object": object(),
}
SAME_TOKENS = {  # as [1, 2, 3, 4]
    "tuple": (1, 2, 3, 4),
    "range": range(1, 5),
    "array of bytes": array.array("b", [1, 2, 3, 4]),
    "numpy numbers": [np.int8(1), np.int64(2), 3, 4],
    "int64": np.array([1, 2, 3, 4]),
    "uint8": np.array([1, 2, 3, 4], dtype=np.uint8),
    "uint32": np.array([1, 2, 3, 4], dtype=np.uint32),
    "uint64": np.array([1, 2, 3, 4], dtype=np.uint64),
    "other byte order": np.array([1, 2, 3, 4], dtype=">i4"),
    "other byte order, 8 bytes": np.array([1, 2, 3, 4], dtype=">i8"),
    "every other one": np.array([1, 9, 2, 9, 3, 9, 4, 9], dtype=np.int32)[::2],
    "backwards": int32([4, 3, 2, 1])[::-1],
    "a column": np.array([[1, 9], [2, 9], [3, 9], [4, 9]], dtype=np.int32)[:, 0],
    "misaligned": np.frombuffer(b"\0" + int32([1, 2, 3, 4]).tobytes(), dtype=np.int32, offset=1),
    "read-only": np.frombuffer(int32([1, 2, 3, 4]).tobytes(), dtype=np.int32),
    "memory": memoryview(int32([1, 2, 3, 4])),
}


@pytest.fixture
def cached(index):
    index.insert(A + B, [0, 1], metadata={"k": 1})
    return index


@pytest.fixture
def unchanged(cached):
    """The index, of which nothing may change."""
    before = rows(cached.blocks()), cached.namespaces(), cached.events().last_sequence
    yield cached
    assert (rows(cached.blocks()), cached.namespaces(), cached.events().last_sequence) == before


def complaint(call) -> str:
    with pytest.raises(PrefixIndexError) as caught:
        call()
    message = str(caught.value)
    assert len(message) > 30 and message.isprintable(), message
    return message


def answer_or_error(call, may_answer: bool):
    """A lookup need not read tokens beyond what matches, so that it may answer a negative one with a miss."""
    try:
        answer = call()
    except PrefixIndexError:
        return None
    assert may_answer
    return answer


@pytest.mark.parametrize("name", NO_TOKENS)
def test_no_tokens(unchanged, name):
    tokens = NO_TOKENS[name]
    lock = unchanged.lookup([9], lock=True, touch=False).lock
    complaint(lambda: unchanged.insert(tokens, [5]))
    complaint(lambda: unchanged.extend(lock, tokens, [5]))
    for look in (lambda: unchanged.lookup(tokens, touch=False), lambda: unchanged.lookup_tiers(tokens)):
        found = answer_or_error(look, may_answer=name.startswith("negative"))
        assert not found or not found.matched_length
    assert not answer_or_error(lambda: unchanged.invalidate(tokens), may_answer=name.startswith("negative"))


@pytest.mark.parametrize("name", NO_TOKENS)
def test_no_block_ids(unchanged, name):
    ids = NO_TOKENS[name]
    complaint(lambda: unchanged.insert(A + [9, 9], ids))
    complaint(lambda: unchanged.move(ids, [5, 6], "gpu", "cpu"))
    complaint(lambda: unchanged.move([0, 1], ids, "gpu", "cpu"))
    complaint(lambda: unchanged.evict(ids))


@pytest.mark.parametrize("name", ["negative", "negative int32"])
def test_negative_ids_are_not_cached(unchanged, name):
    """Asked about, they may be refused or found missing."""
    for ask, nothing in (
        (lambda ids: unchanged.contains(ids).tolist(), [True, False]),
        (lambda ids: places(unchanged.invalidate(kv_block_ids=ids, tier="cpu")), []),
    ):
        with suppress(PrefixIndexError):
            assert ask(NO_TOKENS[name]) == nothing


@pytest.mark.parametrize("hash_prefixes", [prefix_hashes, native_prefix_hashes])
def test_hashes_of_no_tokens(hash_prefixes):
    for name, tokens in NO_TOKENS.items():
        if not name.startswith("negative"):
            complaint(lambda tokens=tokens: hash_prefixes(tokens, 2))
    for block_size in (0, -1, 257, 1.5, None, "2"):
        complaint(lambda size=block_size: hash_prefixes(A, size))


@pytest.mark.parametrize("name", SAME_TOKENS)
def test_tokens_in_other_arrays(cached, name):
    tokens = SAME_TOKENS[name]
    assert places(cached.lookup(tokens)) == [(0, 0), (0, 1)]
    assert places(cached.lookup_tiers(tokens)[0]) == [(0, 0), (0, 1)]
    assert cached.insert(tokens, [0, 1]).num_new_blocks == 0
    cached.insert(tokens, tokens[2:], "other")
    assert places(cached.lookup(A + B, "other")) == [(0, 3), (0, 4)]
    cached.move([0, 1], tokens[2:], "gpu", "nvme")
    assert cached.contains([3, 4], "nvme").all()
    assert (
        prefix_hashes(tokens, 2).tolist()
        == native_prefix_hashes(tokens, 2).tolist()
        == prefix_hashes(A + B, 2).tolist()
    )
    assert len(cached.invalidate(tokens)) == 2


def test_an_array_is_not_kept(index):
    tokens, ids = int32(A + B), int32([0, 1])
    index.insert(tokens, ids)
    tokens[:], ids[:] = 9, 7
    assert places(index.lookup(A + B)) == [(0, 0), (0, 1)]


@pytest.mark.parametrize("empty", [[], (), np.empty(0, np.int32), np.empty(0, np.int64), range(0), array.array("i")])
def test_empty(cached, empty):
    assert cached.insert(empty, empty).token_length == 0
    assert cached.lookup(empty).matched_length == 0
    assert cached.lookup_tiers(empty) == []
    assert len(cached.invalidate(empty)) == len(cached.invalidate(kv_block_ids=empty)) == len(cached.evict(empty)) == 0
    assert cached.contains(empty).tolist() == []
    cached.move(empty, empty, "gpu", "cpu")
    assert cached.num_blocks() == 2


def test_one_token(make):
    short, long = make(1), make(256)
    assert short.insert([5], [0]).token_length == 1
    assert short.lookup([5, 6]).matched_length == 1
    assert long.insert([5], [0]).token_length == 0
    assert long.insert([5], []).token_length == 0
    assert long.lookup([5]).remaining_tokens == 1


@pytest.mark.parametrize("index_class, num_tokens", [(PrefixReuseIndex, 1_000_000), (ReferencePrefixIndex, 10_000)])
def test_a_long_sequence(index_class, num_tokens):
    index = index_class(16)
    tokens = np.arange(num_tokens, dtype=np.int32)
    num_blocks = num_tokens // 16
    assert index.insert(tokens, np.arange(num_blocks)).num_new_blocks == num_blocks
    assert index.lookup(tokens).matched_length == num_tokens
    other = tokens.copy()
    other[-1] = 0
    assert index.lookup(other).matched_length == num_tokens - 16
    assert index.invalidate(tokens).kv_block_ids.tolist() == list(range(num_blocks))[::-1]
    index.check()


def test_tokens_and_ids_may_be_as_large_as_int32(index):
    assert index.insert([HUGE, 0, 0, HUGE], [3, 70_000]).num_new_blocks == 2
    assert index.lookup([HUGE, 0, 0, HUGE]).matched_length == 4
    try:
        index.insert([HUGE, 1], [HUGE])
    except PrefixIndexError:  # an index may have no room for a table that large
        assert not index.contains([HUGE])[0]
    else:
        assert index.contains([HUGE])[0] and len(index.evict_lru(9)) == 3


def test_ids_that_are_cached(unchanged):
    for tokens, ids in (([9, 9], [0]), ([*A, 9, 9], [0, 0]), ([9, 9, 8, 8], [5, 5])):
        with pytest.raises(BlockReuseError) as caught:
            unchanged.insert(tokens, ids)
        assert str(ids[-1]) in str(caught.value)


@pytest.mark.parametrize("given", [[], [5, 6, 7], [5]])
def test_wrong_number_of_ids(unchanged, given):
    message = complaint(lambda: unchanged.insert([9, 9, 8, 8], given))
    assert str(len(given)) in message and "2" in message


@pytest.mark.parametrize("tier", ["tpu", "", "GPU", None, 0, 3, b"gpu", ["gpu"]])
def test_no_tier(unchanged, tier):
    lock = unchanged.lookup([9], lock=True, touch=False).lock
    calls = [
        lambda: unchanged.insert(A, [5], tier=tier),
        lambda: unchanged.extend(lock, A, [5], tier=tier),
        lambda: unchanged.evict_lru(1, tier),
        lambda: unchanged.evict([0], tier),
        lambda: unchanged.select_lru(1, tier),
        lambda: unchanged.move([0], [5], tier, "cpu"),
        lambda: unchanged.move([0], [5], "gpu", tier),
        lambda: unchanged.contains([0], tier),
        lambda: unchanged.invalidate(kv_block_ids=[0], tier=tier),
    ]
    if tier is not None:
        calls += [lambda: unchanged.blocks(tier), lambda: unchanged.num_blocks(tier)]
    for call in calls:
        message = complaint(call)
        assert "gpu, cpu, nvme" in message and repr(tier) in message


@pytest.mark.parametrize(
    "namespace", [7, b"x", ("a", "b", "c"), ["a"], Namespace(tenant=3), "\ud800", Namespace("\ud800")]
)
def test_no_namespace(unchanged, namespace):
    complaint(lambda: unchanged.insert(A, [5], namespace))
    complaint(lambda: unchanged.lookup(A, namespace, touch=False))
    complaint(lambda: unchanged.lookup_tiers(A, namespace))
    complaint(lambda: unchanged.invalidate(A, namespace))
    complaint(lambda: unchanged.invalidate(namespace=namespace))
    complaint(lambda: list(unchanged.entries(namespace)))


def test_namespaces_of_any_text(index):
    names = ["x" * 100_000, "nul\0nul", "nul", "\N{SNOWMAN}", " ", "\n"]
    for number, name in enumerate(names):
        index.insert(A, [number], name)
    assert [places(index.lookup(A, name)) for name in names] == [[(0, number)] for number in range(len(names))]
    assert sorted(index.namespaces()) == sorted(names)
    copy = type(index).restore(index.snapshot())
    assert sorted(copy.namespaces()) == sorted(names)


@pytest.mark.parametrize("size", [0, -1, 257, 1.5, 2**70, "16", None, [16]])
def test_no_block_size(index_class, size):
    message = complaint(lambda: index_class(size))
    assert "256" in message or "whole number" in message


@pytest.mark.parametrize("size", [1, 256, np.int64(16)])
def test_block_sizes(index_class, size):
    assert index_class(size).block_size == size


@pytest.mark.parametrize("capacity", [-1, 1.5, "3", None])
def test_no_event_capacity(index_class, capacity):
    complaint(lambda: index_class(2, event_capacity=capacity))


@pytest.mark.parametrize("number", [-1, 1.5, "3", None, [1]])
def test_no_number_of_blocks(unchanged, number):
    complaint(lambda: unchanged.evict_lru(number))
    complaint(lambda: unchanged.select_lru(number))


@pytest.mark.parametrize("reason", ["because", 3, None])
def test_no_reason(unchanged, reason):
    complaint(lambda: unchanged.evict([1], reason=reason))


@pytest.mark.parametrize("name", [-1, 2**64, 1.5, "1", None, [1], 10**30])
def test_no_lock_and_no_entry(unchanged, name):
    complaint(lambda: unchanged.unlock(name))
    complaint(lambda: unchanged.extend(name, A, [5]))
    complaint(lambda: unchanged.entry(name))
    complaint(lambda: unchanged.tokens(name))
    if name is not None:
        complaint(lambda: unchanged.invalidate(entry_id=name))


@pytest.mark.parametrize("number", [-1, 1.5, "1", None, [1]])
def test_no_event_number(unchanged, number):
    complaint(lambda: unchanged.events(number))


def test_a_lock_of_another_index(index_class):
    ours, others = index_class(2), index_class(2)
    for index in (ours, others):
        index.insert(A, [0])
    lock = others.lookup(A, lock=True).lock
    with pytest.raises(LockError):
        ours.unlock(lock)


def test_unlocking_twice_after_another_lock(index):
    index.insert(A, [0])
    first = index.lookup(A, lock=True).lock
    index.unlock(first)
    second = index.lookup(A, lock=True).lock
    with pytest.raises(LockError):
        index.unlock(first)
    index.unlock(second)
    assert first != second


def test_a_subclass_may_be_used_before_it_is_ready(index_class):
    class Unready(index_class):
        def __init__(self):
            pass

    with pytest.raises((TypeError, AttributeError)):
        Unready().lookup(A)
