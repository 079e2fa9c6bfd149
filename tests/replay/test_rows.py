"""From counts to rows: rates, estimates, regret, and what is drawn of them."""

from dataclasses import replace

import numpy as np
import pytest

from sagellm.core.errors import CapacityError, ConfigError, PolicyError
from sagellm.core.hooks import Tier
from sagellm.replay.base import Semantics
from sagellm.replay.plots import write_plots
from sagellm.replay.policies import BELADY, Contestant, find_contestant
from sagellm.replay.report import caption, document, errors, table
from sagellm.replay.run import ReplayOptions, make_row, run, run_tiers, ttft
from sagellm.replay.session import replay
from tests.replay.made import trace_of
from tests.replay.policies import Arrival, Recency

ROWS = [[1, 2, 3], [4], [1, 2, 3], [1, 5]]
INPUTS = [11, 4, 11, 7]  # blocks of 4 tokens, the last ones partly filled
LRU = Contestant("recency", {}, Recency, False)
FIFO = Contestant("arrival", {}, Arrival, False)
BOUND = Contestant(BELADY, {}, None, False)


def test_a_row_with_prefix_semantics():
    """Capacity 4: 3 blocks of [1, 2, 3] are found, then 1."""
    trace = replace(trace_of(ROWS, inputs=INPUTS), num_skipped=2)
    (row,) = replay(trace, [LRU], [4], ReplayOptions(prefill_tokens_per_s=2.0, reference=True))
    assert (row.policy, row.capacity, row.semantics, row.accesses, row.hit_blocks) == ("recency", 4, "prefix", 9, 4)
    assert row.hit_rate_block == row.hit_rate_block_with_retries == 4 / 9
    assert row.hit_rate_token == (11 + 4) / 33  # a found last block holds 3 tokens, not 4
    assert (row.evictions, row.evictions_soon, row.evictions_soon_share, row.retries) == (1, 0, 0.0, 0)
    assert row.belady_hit_rate_block == 4 / 9 and row.regret_block == 0.0 and row.skipped_lines == 2
    # Tokens to compute: 11, 4, at least 1 of 11, 3 of 7.
    assert row.ttft_mean_s == (11 + 4 + 1 + 3) / 4 / 2 and row.ttft_p50_s == 3.5 / 2


def test_a_row_with_object_semantics():
    """Room for 3: of 1 2 3 4 1 2 3 1 5 LRU finds the last 1 only. Belady's also finds 1 and 2 when they come again."""
    trace = trace_of(ROWS, inputs=INPUTS)
    lru, bound = replay(trace, [LRU, BOUND], [3], ReplayOptions(semantics=Semantics.OBJECT, reference=True))
    assert lru.hit_rate_block == 1 / 9 and lru.hit_rate_token == 4 / 33 and lru.evictions == 5
    assert bound.hit_blocks == 3 and lru.regret_block == pytest.approx(2 / 9) and bound.regret_block == 0.0
    assert lru.ttft_mean_s == pytest.approx((33 - 4) / 4 / 10_000)


def test_retries_count_apart():
    trace = trace_of([[1], [2]], block_size=1, outputs=[10, 0])
    (row,) = replay(trace, [LRU], [3], ReplayOptions(running=2, outputs=True, reference=True), with_bound=False)
    assert (row.retries, row.preempted, row.hit_rate_block, row.hit_rate_block_with_retries) == (2, 2, 0.0, 1 / 4)
    assert row.regret_block is None and row.belady_hit_rate_block is None


@pytest.mark.parametrize("reference", [False, True])
def test_a_run_without_room_is_a_row_with_its_error(reference, tmp_path):
    trace = trace_of([[1, 2, 3], [1, 2, 3]], outputs=[4, 4])
    lru = find_contestant("lru", {}, reference=reference)
    options = ReplayOptions(running=2, outputs=True, reference=reference)
    stuck, done = rows = replay(trace, [lru], [3, 9], options)
    assert "preempt each other" in stuck.error and stuck.hit_rate_block is None and stuck.regret_block is None
    assert done.error is None and done.hit_blocks == 3 and done.regret_block == 0.0
    assert table(rows).row_count == 2 and errors(rows) == [f"lru at 3: {stuck.error}"]
    assert all(file.exists() for file in write_plots(rows, "by hand", tmp_path))
    with pytest.raises(CapacityError, match="preempt each other"):
        replay(trace, [lru], [3], options)


def test_regret_has_a_sign():
    """Where requests preempt each other the bound is a good policy and no bound, and a row may be above it."""
    trace, options = trace_of(ROWS), ReplayOptions(reference=True)
    outcome = run(trace, LRU, 4, options)
    above = make_row(trace, LRU, 4, options, replace(outcome, hit_blocks=outcome.hit_blocks + 2), outcome)
    assert above.regret_block == pytest.approx(-2 / 9) and above.belady_hit_rate_block == 4 / 9


@pytest.mark.parametrize("tiers", [False, True])
def test_policies_are_told_times_sizes_and_tenants(tiers):
    told = []

    class Listening(Recency):
        def on_insert(self, block):
            told.append((block.key, block.time_s, block.num_tokens, block.size_bytes, block.depth, block.tenant_id))
            super().on_insert(block)

        def on_hit(self, key, time_s=0.0):
            told.append((key, time_s))
            super().on_hit(key, time_s)

    trace = replace(trace_of([[1, 2], [3], [1]]), tenants=("a", "b", "c"), times_s=np.array([0.5, 2.0, 3.5]))
    contestant, options = Contestant("listening", {}, Listening, False), ReplayOptions(reference=True, token_bytes=3)
    if tiers:
        run_tiers(trace, contestant, {Tier.GPU: 5}, options)
    else:
        run(trace, contestant, 5, options)
    assert told == [(2, 0.5, 4, 12, 2, "a"), (1, 0.5, 4, 12, 1, "a"), (3, 2.0, 4, 12, 1, "b"), (1, 3.5)]


def test_rows_come_as_asked_for():
    rows = replay(trace_of(ROWS), [FIFO, BOUND, LRU], [9, 2], ReplayOptions(reference=True))
    assert [(row.policy, row.capacity) for row in rows] == [
        ("arrival", 9), ("arrival", 2), ("belady", 9), ("belady", 2), ("recency", 9), ("recency", 2)
    ]  # fmt: skip
    assert [row.oversized for row in rows] == [0, 2] * 3


@pytest.mark.parametrize("semantics", Semantics)
def test_progress_rises_to_one(semantics):
    trace = trace_of([[number, number + 1] for number in range(0, 9000, 2)])
    parts = []
    options = ReplayOptions(semantics=semantics, reference=True)
    replay(trace, [LRU, FIFO], [5], options, report=lambda what, part: parts.append(part))
    assert parts == sorted(parts) and parts[-1] == 1.0 and len(parts) > 4 and 0 < parts[0] < 0.35


def test_moves_add_to_the_estimate():
    trace = trace_of([[1], [2]])
    assert ttft(trace, np.array([0, 4]), 1.0, np.array([0.0, 2.0]))["ttft_mean_s"] == (4 + 1 + 2) / 2


def test_document_and_table():
    trace = trace_of(ROWS)
    rows = replay(trace, [LRU], [3], ReplayOptions(reference=True))
    found = document(trace, rows, plots=["a.png"])
    assert (
        found["trace"]["sha256"] == trace.sha256
        and found["trace"]["distinct_blocks"] == 5
        and found["plots"] == ["a.png"]
    )
    assert found["rows"][0]["hit_rate_block"] == rows[0].hit_rate_block
    headers = [str(column.header) for column in table(rows).columns]
    assert caption(trace, rows) == "by hand: 4 requests, 9 blocks of 4 tokens, 5 distinct; prefix semantics"
    assert "regret" in headers and "from\ncpu" not in headers


def test_plots(tmp_path):
    rows = replay(trace_of(ROWS), [LRU, FIFO], [2, 3, 20], ReplayOptions(reference=True))
    files = write_plots(rows, "by hand", tmp_path / "new")
    assert [file.name for file in files] == ["hit_rate.png", "evictions.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_plots(rows, "by hand", tmp_path / "file")


def test_belady_takes_no_options():
    with pytest.raises(PolicyError, match="its future is the trace"):
        find_contestant("belady", {"future": []}, reference=True)
    assert find_contestant("Belady", {}, reference=True).build is None
