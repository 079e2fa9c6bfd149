"""Prefix semantics on random trees of requests: what always holds, and a second simulator that is nothing but loops."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import CapacityError
from sagellm.replay.belady import Belady
from sagellm.replay.prefix import PrefixReplay
from tests.replay.made import flat, replayed
from tests.replay.policies import Arrival, Recency

NUM_KEYS = 12


@st.composite
def trees(draw):
    """Requests that are paths in a tree: block k continues block (k - 1) // 2, or is a root."""
    ends = draw(st.lists(st.integers(0, NUM_KEYS), min_size=1, max_size=25))
    rows = []
    for end in ends:
        row = []
        while end > 0:
            row.append(end)
            end = (end - 1) // 2
        rows.append(row[::-1])
    return rows


def naive(rows, capacity):
    """Hits of LRU with one request at a time, by looking at every block again and again."""
    parent, stamp, now, hits = {}, {}, 0, []
    for row in rows:
        row = row[:capacity]
        num_hits = 0
        while num_hits < len(row) and row[num_hits] in stamp:
            num_hits += 1
        hits.append(num_hits)
        for key in row[:num_hits][::-1]:
            now += 1
            stamp[key] = now
        held = row[:num_hits]
        while len(stamp) + len(row) - num_hits > capacity:
            free = [key for key in stamp if key not in held and all(parent[other] != key for other in stamp)]
            del stamp[min(free, key=stamp.get)]
        for place in range(len(row) - 1, num_hits - 1, -1):
            now += 1
            stamp[row[place]], parent[row[place]] = now, row[place - 1] if place else None
    return hits


@settings(max_examples=150, deadline=None)
@given(trees(), st.integers(1, 10))
def test_equal_to_plain_loops(rows, capacity):
    assert replayed(Recency, rows, capacity).hit_blocks.tolist() == naive(rows, capacity)


@settings(max_examples=150, deadline=None)
@given(
    trees(), st.integers(1, 10), st.integers(1, 4), st.lists(st.integers(0, 6), min_size=25, max_size=25),
    st.sampled_from([Recency, Arrival]),
)  # fmt: skip
def test_what_always_holds(rows, capacity, running, outputs, kind):
    keys, offsets = flat(rows)
    sizes = np.array(outputs[: len(rows)], np.int32)
    replay = PrefixReplay(kind(capacity), keys, offsets, capacity=capacity, running=running, output_blocks=sizes)
    try:
        counts = replay.run(lambda num_admitted: replay.check())
    except CapacityError:
        return
    replay.check()
    lengths = np.diff(offsets)
    assert (counts.hit_blocks <= np.minimum(lengths, capacity)).all()
    assert counts.num_oversized == (lengths > capacity).sum()
    assert counts.retries == counts.num_preempted and counts.num_evicted_soon <= counts.num_evicted
    assert counts.retry_hit_blocks <= counts.retry_blocks


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(1, 10))
def test_the_bound_holds(rows, capacity):
    keys, offsets = flat(rows)
    best = PrefixReplay(Belady(capacity, keys=keys, offsets=offsets), keys, offsets, capacity=capacity).run()
    for kind in (Recency, Arrival):
        assert best.hit_blocks.sum() >= replayed(kind, rows, capacity).hit_blocks.sum()
