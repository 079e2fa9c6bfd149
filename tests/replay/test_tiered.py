"""Replays over several tiers, on the books that serve in the engine."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import ConfigError
from sagellm.core.hooks import Tier
from sagellm.kv_policy.registry import policy_names
from sagellm.replay.generate import generate
from sagellm.replay.policies import BELADY, Contestant, find_contestant
from sagellm.replay.prefix import replay_prefix_reference
from sagellm.replay.run import ReplayOptions, run_tiers
from sagellm.replay.session import replay
from sagellm.replay.tiered import TieredReplay, build_manager, parse_tiers
from tests.replay.made import trace_of
from tests.replay.policies import Recency
from tests.replay.test_prefix_properties import trees

LRU = Contestant("tests.replay.policies:Recency", {}, Recency, False)


def tiered(rows, text, running=1):
    trace, tiers = trace_of(rows), parse_tiers(text)
    manager, backend = build_manager(trace, LRU, tiers, migration="always", reference=True, token_bytes=1)
    replay = TieredReplay(trace, manager, backend, capacity=tiers[Tier.GPU], running=running)
    return replay.run(), manager


def test_what_left_comes_back():
    """gpu has room for one of two prompts. Where cpu has room for one too, what gpu holds cannot change places with it."""
    found, _ = tiered([[1, 2], [3, 4], [1, 2], [3, 4]], "gpu:2,cpu:2")
    assert found.counts.hit_blocks.tolist() == [0, 0, 2, 0]
    found, _ = tiered([[1, 2], [3, 4], [1, 2], [3, 4]], "gpu:2,cpu:4")
    assert found.counts.hit_blocks.tolist() == [0, 0, 2, 2]
    assert found.loaded_blocks["cpu"].tolist() == [0, 0, 2, 2] and found.loaded_blocks["nvme"].sum() == 0
    assert found.moved_bytes == {"gpu-cpu": 6 * 4, "cpu-gpu": 4 * 4} and found.counts.num_evicted == 6


def test_what_went_to_files_comes_back():
    rows = [[1, 2], [3, 4], [5, 6], [7, 8], [1, 2]]
    found, _ = tiered(rows, "gpu:2,cpu:2,nvme:20")
    assert found.counts.hit_blocks.tolist() == [0, 0, 0, 0, 2] and found.loaded_blocks["nvme"].tolist() == [
        0,
        0,
        0,
        0,
        2,
    ]
    assert found.moved_bytes["nvme-cpu"] == 2 * 4


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(2, 8), st.integers(1, 3))
def test_one_tier_is_the_replay_on_one_tier(rows, capacity, running):
    trace = trace_of(rows)
    found, _ = tiered(rows, f"gpu:{capacity}", running)
    plain = replay_prefix_reference(Recency(capacity), trace.keys, trace.offsets, capacity=capacity, running=running)
    assert found.counts.hit_blocks.tolist() == plain.hit_blocks.tolist()
    assert (found.counts.num_evicted, found.counts.num_evicted_soon, found.counts.num_oversized) == (
        plain.num_evicted, plain.num_evicted_soon, plain.num_oversized
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(policy_names()) - {BELADY}))
def test_one_tier_is_the_native_replay_for_every_policy(name):
    """With blocks of 48 * 12,288 bytes: a size that is no power of two shows in the rounding of GDSF's priorities."""
    trace, contestant = (
        generate("zipf:requests=150,prefixes=40,block_size=48"),
        find_contestant(name, {}, reference=False),
    )
    tiers = run_tiers(trace, contestant, {Tier.GPU: 120}, ReplayOptions(soon=40))
    (plain,) = replay(trace, [contestant], [120], ReplayOptions(soon=40), with_bound=False)
    assert plain.implementation == "native" and plain.evictions_soon > 0
    for field in ("hit_blocks", "hit_rate_token", "evictions", "evictions_soon", "oversized"):
        assert getattr(tiers, field) == getattr(plain, field), field


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(4, 8), st.integers(1, 8), st.integers(0, 20), st.integers(1, 3))
def test_books_stay_right(rows, gpu, cpu, nvme, running):
    found, manager = tiered(rows, f"gpu:{gpu},cpu:{cpu}" + (f",nvme:{nvme}" if nvme else ""), running)
    manager.books.check()
    assert all(manager.num_free(spec.tier) >= 0 for spec in manager.tiers)
    assert (found.loaded_blocks["cpu"] + found.loaded_blocks["nvme"] <= found.counts.hit_blocks).all()


@settings(max_examples=30, deadline=None)
@given(trees())
def test_with_room_for_all_everything_is_found(rows):
    found, _ = tiered(rows, "gpu:4,cpu:50")
    seen, expected = set(), []
    for row in rows:
        expected.append(next((place for place, key in enumerate(row) if key not in seen), len(row)))
        seen.update(row)
    assert found.counts.hit_blocks.tolist() == expected


@pytest.mark.parametrize("text", ["", "gpu", "gpu:x", "gpu:-1", "cpu:5", "gpu:5,disk:3", "cpu:5,gpu:5"])
def test_bad_tiers(text):
    with pytest.raises(ConfigError, match="tiers"):
        parse_tiers(text)
