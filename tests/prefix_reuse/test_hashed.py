"""An index without tokens: right when hashes are long, honest when they are short, and safe with verification."""

import math

import numpy as np
import pytest

from sagellm.core.errors import LockError, PrefixIndexError
from sagellm.prefix_reuse import (
    HashedPrefixIndex,
    PrefixMatcher,
    PrefixReuseIndex,
    ReferencePrefixIndex,
    Verdict,
    prefix_hashes,
)
from tests.prefix_reuse.cases import places, sequence

BLOCK = 4


@pytest.fixture(params=[ReferencePrefixIndex, PrefixReuseIndex], ids=lambda cls: cls.__name__)
def make(request):
    def new(block_size: int = BLOCK, hash_bits: int = 64) -> HashedPrefixIndex:
        return HashedPrefixIndex(block_size, hash_bits, index=request.param(2))

    return new


def test_finds_what_an_index_with_tokens_finds(make):
    hashed, exact = make(), ReferencePrefixIndex(BLOCK)
    rng = np.random.default_rng(3)
    for number in range(60):
        path = rng.integers(0, 3, size=4)
        tokens = sequence(path, BLOCK, num_rest=int(rng.integers(0, BLOCK)))
        resident = exact.lookup(tokens).kv_block_ids.tolist()
        ids = resident + list(range(10 * number + 5, 10 * number + 9 - len(resident)))
        ours, theirs = hashed.insert(tokens, ids), exact.insert(tokens, ids)
        assert places(ours) == places(theirs)
        assert (ours.token_length, ours.num_new_blocks) == (theirs.token_length, theirs.num_new_blocks)
        query = sequence(rng.integers(0, 3, size=5), BLOCK, num_rest=2)
        ours, theirs = hashed.lookup(query), exact.lookup(query)
        assert places(ours) == places(theirs)
        assert (ours.matched_length, ours.remaining_tokens) == (theirs.matched_length, theirs.remaining_tokens)
        if number % 7 == 6:
            assert places(hashed.evict_lru(9)) == places(exact.evict_lru(9))
    assert hashed.num_blocks() == exact.num_blocks() > 10


def test_a_hit_is_never_exact_and_a_miss_is_sure(make):
    index = make()
    assert index.lookup([1] * 8).confidence == 1.0
    index.insert([1] * 8, [0, 1])
    hit = index.lookup([1] * 8)
    assert hit.matched_length == 8 and hit.confidence < 1.0
    assert hit.confidence == math.nextafter(1.0, 0.0)  # as near as a float gets to 1 - 2 * 2**-62


@pytest.mark.parametrize("hash_bits", [1, 8, 20, 40])
def test_confidence_says_how_often_strangers_miss(make, hash_bits):
    index = make(1, hash_bits)
    for number in range(20):
        index.insert([number], [number])
    confidence = index.lookup([0]).confidence
    assert confidence == pytest.approx(max(0.0, 1 - index.num_blocks() * 2.0**-hash_bits))
    assert confidence < 1.0
    strangers = range(1000, 3000)
    missed = sum(index.lookup([number]).matched_length == 0 for number in strangers) / len(strangers)
    assert missed == pytest.approx(confidence, abs=0.04)  # of one level of blocks the bound is exact


def test_confidence_holds_for_deep_trees(make):
    index = make(1, 8)
    rng = np.random.default_rng(0)
    known = rng.integers(0, 1000, size=(30, 4))
    for number, tokens in enumerate(known):
        index.insert(tokens, range(4 * number, 4 * number + 4))
    confidence = index.lookup(known[0]).confidence
    strangers = rng.integers(10_000, 20_000, size=(2000, 4))
    missed = sum(index.lookup(tokens).matched_length == 0 for tokens in strangers) / len(strangers)
    assert 0.4 < confidence < missed


def test_short_hashes_collide_and_verification_catches_every_one(make):
    index = make(BLOCK, 8)
    rng = np.random.default_rng(1)
    stored: dict[tuple[int, int], tuple[int, ...]] = {}  # what was written, by block
    for number in range(120):
        tokens = rng.integers(0, 1000, size=2 * BLOCK).tolist()
        entry = index.insert(tokens, [2 * number, 2 * number + 1])
        for row in range(2 - entry.num_new_blocks, 2):
            stored[places(entry)[row]] = tuple(tokens[row * BLOCK : (row + 1) * BLOCK])

    def read_tokens(hit) -> list[int]:
        return [token for place in places(hit) for token in stored[place]]

    false_hits = true_hits = 0
    for _ in range(600):
        tokens = rng.integers(0, 1000, size=2 * BLOCK).tolist()
        hit = index.lookup(tokens)
        if hit.matched_length:
            assert hit.confidence < 1.0
            truth = read_tokens(hit) == tokens[: hit.matched_length]
            false_hits += not truth
            assert index.verify(hit, tokens, read_tokens) is truth
            assert index.verify(hit, tokens, lambda hit: None)  # the hash alone is fooled
    assert false_hits > 50
    assert index.matcher.collisions == false_hits
    for (_, block), part in list(stored.items()):
        if block % 2 == 0:
            hit = index.lookup(part)
            assert hit.confidence < 1.0
            true_hits += index.verify(hit, part, read_tokens)
    assert true_hits > 50
    assert index.matcher.counts[Verdict.DIFFERENT] == index.matcher.counts[Verdict.LENGTH] == 0


def test_a_collision_at_insertion_names_the_blocks_that_were_there(make):
    index = make(1, 1)
    first = index.insert([0], [0])
    other = next(n for n in range(1, 99) if (int(prefix_hashes([n], 1)[0]) ^ first.token_hash) & 1 == 0)
    entry = index.insert([other], [5])
    assert (places(entry), entry.num_new_blocks) == ([(0, 0)], 0)
    assert not index.verify(index.lookup([other]), [other], lambda hit: [0])


def test_long_hashes_tell_apart_what_short_ones_do_not(make):
    index = make(1)
    for number in range(500):
        index.insert([number], [number])
    assert all(places(index.lookup([number])) == [(0, number)] for number in range(500))
    assert not any(index.lookup([number]).matched_length for number in range(500, 1500))


def test_a_prefix_that_left_holds_nothing(make):
    index = make()
    index.insert([1] * 8, [0, 1])
    hit = index.lookup([1] * 8)
    assert index.verify(hit, [1] * 8, lambda hit: [1] * 8)
    index.evict_lru(9)
    assert not index.verify(hit, [1] * 8, lambda hit: [1] * 8)


def test_verify_looks_at_the_tokens_it_is_given(make):
    index = make()
    index.insert([1] * 8, [0, 1])
    hit = index.lookup([1] * 8)
    assert not index.verify(hit, [1] * 7 + [2], lambda hit: [1] * 8)
    assert not index.verify(hit, [1] * 4, lambda hit: [1] * 8)
    assert not index.verify(hit, [1] * 8, lambda hit: [1] * 4)
    assert index.matcher.collisions == 0


def test_an_entry_has_the_bits_that_are_kept(make):
    tokens = list(range(8))
    for hash_bits, kept in ((64, 62), (62, 62), (10, 10)):
        index = make(BLOCK, hash_bits)
        assert index.hash_bits == kept
        entry = index.insert(tokens, [0, 1])
        assert entry.token_hash == int(prefix_hashes(tokens, BLOCK)[-1]) % 2**kept
        again = index.entry(entry.entry_id)
        assert (again.token_hash, again.token_length, places(again)) == (entry.token_hash, 8, places(entry))
        assert PrefixMatcher(BLOCK, kept).verify(tokens, again)


def test_locks_tiers_and_namespaces_are_those_of_the_index_below(make):
    index = make()
    index.insert([1] * 8, [0, 1], "x", tier="cpu")
    hit = index.lookup([1] * 8 + [2], "x", lock=True)
    assert (hit.remaining_tokens, places(hit)) == (1, [(1, 0), (1, 1)])
    assert index.lookup([1] * 8).matched_length == 0
    assert len(index.evict_lru(9, "cpu")) == 0
    with pytest.raises(LockError):
        index.invalidate(kv_block_ids=[0], tier="cpu")
    index.unlock(hit.lock)
    assert len(index.invalidate(namespace="x")) == 2
    assert index.num_blocks("cpu") == 0


def test_a_last_part_is_left_out(make):
    index = make()
    assert index.insert([1] * 7, [0, 1]).token_length == 4
    assert index.insert([1] * 3, []).token_length == 0
    assert index.lookup([1] * 7).remaining_tokens == 3


@pytest.mark.parametrize(
    "build",
    [
        lambda: HashedPrefixIndex(0),
        lambda: HashedPrefixIndex(16, 0),
        lambda: HashedPrefixIndex(16, 65),
        lambda: HashedPrefixIndex(16, index=ReferencePrefixIndex(16)),
        lambda: HashedPrefixIndex(16).insert([1] * 16, []),
        lambda: HashedPrefixIndex(16).insert([1] * 16, [0, 1]),
        lambda: HashedPrefixIndex(16).insert([1.0] * 16, [0]),
        lambda: HashedPrefixIndex(16).lookup("text"),
        lambda: HashedPrefixIndex(16).entry(1),
    ],
)
def test_nonsense(build):
    with pytest.raises(PrefixIndexError):
        build()


def test_the_index_below_must_be_empty():
    below = ReferencePrefixIndex(2)
    below.insert([1, 2], [0])
    with pytest.raises(PrefixIndexError):
        HashedPrefixIndex(16, index=below)


def test_eight_bytes_of_hash_a_block():
    hashed, exact = HashedPrefixIndex(256), PrefixReuseIndex(256)
    tokens = np.arange(256 * 4096, dtype=np.int32)
    empty = PrefixReuseIndex(2).memory_bytes()
    hashed.insert(tokens, np.arange(4096))
    exact.insert(tokens, np.arange(4096))
    assert hashed.memory_bytes() - empty < 4096 * 40
    assert exact.memory_bytes() > 4096 * 1024
