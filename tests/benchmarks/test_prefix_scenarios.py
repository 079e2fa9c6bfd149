"""The component scenarios of the prefix index measure what they say, and refuse what they cannot measure."""

import numpy as np
import pytest

from benchmarks.prefix.contestants.base import Found
from benchmarks.prefix.contestants.sagellm_index import SageContestant
from benchmarks.scenarios import prefix_eviction, prefix_index, prefix_readers
from sagellm.prefix_reuse import PrefixReuseIndex


@pytest.mark.parametrize("block_size", [16, 64])
def test_memory_is_that_of_what_is_cached(block_size: int):
    metrics = prefix_index.run(1, block_size=block_size, num_sequences=600, num_lookups=400)
    floor = 4 + 4 / block_size  # a token and its share of a block id
    assert floor < metrics["prefix_index_bytes_per_token"] < 2 * floor
    per_lookup = metrics["prefix_index_lookup_us"] * 1e3 / metrics["prefix_index_ns_per_matched_token"]
    assert per_lookup == pytest.approx(3_300, rel=0.5)  # tokens


def test_a_broken_index_gives_no_figures(monkeypatch: pytest.MonkeyPatch):
    right = SageContestant.found

    def wrong(self, query):
        found = right(self, query)
        return Found(found.num_tokens, found.block_ids + 1)

    monkeypatch.setattr(SageContestant, "found", wrong)
    with pytest.raises(RuntimeError, match="the index is broken: 8 wrong answers; lookup 0 found other blocks"):
        prefix_index.run(1, block_size=16, num_sequences=20, num_lookups=8)


@pytest.mark.parametrize("num_leaves, count", [(1_000, 64), (100, 4_096), (1, 1)])
def test_leaves_go_least_recently_used_first(monkeypatch: pytest.MonkeyPatch, num_leaves: int, count: int):
    evicted: list[np.ndarray] = []
    touched: list[int] = []

    class Watched(PrefixReuseIndex):
        def lookup(self, tokens):
            hit = super().lookup(tokens)
            assert hit.matched_length == len(tokens) == 32
            touched.append(int(hit.kv_block_ids[-1]))
            return hit

        def evict_lru(self, num_blocks):
            removed = super().evict_lru(num_blocks)
            evicted.append(removed.kv_block_ids)
            return removed

    monkeypatch.setattr("sagellm.prefix_reuse.PrefixReuseIndex", Watched)
    assert prefix_eviction.run(1, num_leaves, count, 16)["prefix_eviction_ns_per_block"] > 0
    calls = max(num_leaves // 2 // count, 1)
    first = np.concatenate(evicted[:calls])
    leaves = first[first < num_leaves].tolist()
    assert leaves == touched[: len(leaves)] and len(leaves) >= min(num_leaves, calls * count) * 0.9
    assert num_leaves == 1 or touched[:num_leaves] != sorted(touched[:num_leaves])
    assert len(evicted) >= prefix_eviction.MIN_CALLS


def test_readers_are_asked_with_and_without_a_writer():
    metrics = prefix_readers.run(1, num_tokens=1_024, block_size=16, rounds=2, seconds=0.01)
    assert metrics.keys() == prefix_readers.DEFINITIONS.keys() and min(metrics.values()) > 0


def test_the_writer_evicts_what_it_wrote_and_nothing_else():
    setup = prefix_readers._Readers(np.random.default_rng(1), 1_024, 16)
    before = setup._index.num_blocks()
    setup.rate(1, setup.lookup, True, 0.05)
    metrics = setup._index.metrics()
    assert setup._index.num_blocks() == before
    assert metrics["inserts"] > prefix_readers.NUM_PROMPTS


def test_a_reader_that_misses_ends_the_measurement():
    setup = prefix_readers._Readers(np.random.default_rng(1), 1_024, 16)
    setup._index.clear()
    with pytest.raises(RuntimeError, match="a reader found 0 tokens of a prompt of 1024"):
        setup.rate(2, setup.lookup, False, 0.01)


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match="num_lookups is 0; allowed are 1"):
        prefix_index.run(1, block_size=16, num_sequences=10, num_lookups=0)
    with pytest.raises(ValueError, match="allowed are 1 and more"):
        prefix_eviction.run(1, num_leaves=0, count=64, block_size=16)
    with pytest.raises(ValueError, match="num_tokens is 15; allowed are 16"):
        prefix_readers.run(1, num_tokens=15, block_size=16, rounds=1, seconds=0.01)
