"""Hashes that all sides agree on, and comparisons that a collision cannot fool."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm import prefix_reuse
from sagellm.core.errors import PrefixIndexError
from sagellm.prefix_reuse import PrefixEntry, PrefixMatcher, Verdict
from sagellm.prefix_reuse.matcher import EMPTY_HASH, prefix_hashes
from tests.prefix_reuse.cases import int32

# Written down once: the hash is part of what instances tell each other, so no change may alter it.
KNOWN = {
    (1, (0,)): 0x0BE43C0ABACCF830,
    (2, (1, 2, 3, 4)): 0x9F6DD952E8085D3D,
    (16, tuple(range(16))): 0x5AB67FEE4D30CE27,
}


def make_entry(tokens, block_size: int = 2, token_hash: int | None = None) -> PrefixEntry:
    hashes = prefix_hashes(tokens, block_size)
    return PrefixEntry(
        entry_id=1, token_hash=int(hashes[-1]) if token_hash is None else token_hash, token_length=len(tokens),
        kv_block_ids=range(len(tokens) // block_size), tiers=[0] * (len(tokens) // block_size),
    )  # fmt: skip


@pytest.mark.parametrize("block_size, tokens", KNOWN)
def test_hashes_are_for_ever(block_size, tokens):
    assert int(prefix_hashes(tokens, block_size)[-1]) == KNOWN[block_size, tokens]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.integers(1, 256), st.lists(st.integers(0, 2**31 - 1), max_size=600))
def test_both_hash_the_same(block_size, tokens):
    ours, native = prefix_hashes(tokens, block_size), prefix_reuse.prefix_hashes(int32(tokens), block_size)
    assert ours.dtype == native.dtype == np.uint64
    assert ours.tolist() == native.tolist()
    assert len(ours) == len(tokens) // block_size


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 16, 255, 256])
def test_every_token_counts(block_size):
    tokens = np.arange(3 * block_size, dtype=np.int32)
    hashes = prefix_hashes(tokens, block_size)
    for position in range(0, len(tokens), max(1, block_size // 8)):
        other = tokens.copy()
        other[position] ^= 1 << 30
        equal = prefix_hashes(other, block_size) == hashes
        assert equal.tolist() == [row < position // block_size for row in range(3)]


def test_length_and_order_count():
    """Zeros that fill up a block must not look like tokens, nor one block like another."""
    assert len({int(prefix_hashes([0] * size, size)[0]) for size in range(1, 257)}) == 256
    assert prefix_hashes([1, 2, 3, 4], 2)[-1] != prefix_hashes([3, 4, 1, 2], 2)[-1]
    assert prefix_hashes([7] * 8, 2).tolist() != prefix_hashes([7] * 8, 4).tolist()
    assert len(set(prefix_hashes([7] * 2000, 1).tolist())) == 2000


def test_hashes_of_another_process():
    code = "from sagellm.prefix_reuse.matcher import prefix_hashes; print(prefix_hashes(range(100), 16).tolist())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(prefix_hashes(range(100), 16).tolist())


def test_no_tokens_no_hashes():
    assert prefix_hashes([], 2).tolist() == prefix_hashes([1], 2).tolist() == []


def test_same_tokens_hold():
    matcher, entry = PrefixMatcher(2), make_entry([1, 2, 3, 4])
    assert matcher.verify([1, 2, 3, 4, 5], entry, [1, 2, 3, 4])
    assert matcher.verify(int32([1, 2, 3, 4]), entry)
    assert matcher.judge([1, 2, 3, 4], entry, int32([1, 2, 3, 4])) is Verdict.SAME_TOKENS
    assert matcher.judge([1, 2, 3, 4], entry) is Verdict.SAME_HASH
    assert matcher.collisions == 0


@pytest.mark.parametrize(
    "query, stored, verdict",
    [
        ([1, 2, 3], None, Verdict.LENGTH),
        ([], [1, 2, 3, 4], Verdict.LENGTH),
        ([1, 2, 3, 4], [1, 2], Verdict.LENGTH),
        ([1, 2, 3, 4], [], Verdict.LENGTH),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], Verdict.LENGTH),
        ([1, 2, 3, 5], None, Verdict.DIFFERENT),
        ([1, 2, 3, 5], [1, 2, 3, 4], Verdict.DIFFERENT),
    ],
)
def test_others_do_not(query, stored, verdict):
    matcher, entry = PrefixMatcher(2), make_entry([1, 2, 3, 4])
    assert matcher.judge(query, entry, stored) is verdict
    assert not matcher.verify(query, entry, stored)
    assert matcher.counts[verdict] == 2 and sum(matcher.counts.values()) == 2


def test_a_collision_is_caught_and_counted():
    """An entry with the query's hash, stored for other tokens: what a collision looks like from outside."""
    matcher = PrefixMatcher(2)
    entry = make_entry([9, 9, 9, 9], token_hash=int(prefix_hashes([1, 2, 3, 4], 2)[-1]))
    assert matcher.verify([1, 2, 3, 4], entry)  # the hash alone cannot know
    assert matcher.judge([1, 2, 3, 4], entry, [9, 9, 9, 9]) is Verdict.COLLISION
    assert not matcher.verify([1, 2, 3, 4], entry, [9, 9, 9, 9])
    assert matcher.collisions == 2


def test_few_bits_collide():
    entry = make_entry([1, 2])
    full, few = PrefixMatcher(2, 64), PrefixMatcher(2, 4)
    others = [[3, number] for number in range(400)]
    assert not any(full.verify(tokens, entry) for tokens in others)
    assert sum(few.verify(tokens, entry) for tokens in others) in range(10, 50)  # 25 are expected
    for tokens in others:
        few.verify(tokens, entry, [1, 2])
    assert few.collisions == few.counts[Verdict.SAME_HASH]


def test_the_empty_prefix_begins_everything():
    entry = PrefixEntry(entry_id=0, token_hash=EMPTY_HASH, token_length=0, kv_block_ids=[], tiers=[])
    assert PrefixMatcher(2).verify([1, 2], entry) and PrefixMatcher(2).verify([], entry, [])


@pytest.mark.parametrize(
    "arguments", [dict(block_size=0), dict(block_size=True), dict(hash_bits=0), dict(hash_bits=65)]
)
def test_no_matcher(arguments):
    with pytest.raises(PrefixIndexError):
        PrefixMatcher(**arguments)


@pytest.mark.parametrize(
    "tokens, stored", [([1.5], None), ([[1]], None), ([1, 2, 3, 4], ["a"] * 4), ([1, 2, 3, 4], [-1] * 4)]
)
def test_no_tokens_to_compare(tokens, stored):
    with pytest.raises(PrefixIndexError):
        PrefixMatcher(2).verify(tokens, make_entry([1, 2, 3, 4]), stored)
