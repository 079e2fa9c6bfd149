"""Eviction of the prefix index among many leaves whose recency has nothing to do with where they lie."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.process_cost import spent
from benchmarks.result import Definition

OPTIONS: dict[str, Any] = {"num_leaves": 10_000, "count": 64, "block_size": 16}
SIBLINGS = 64
MIN_CALLS = 16
DEFINITIONS = {
    "prefix_eviction_ns_per_block": Definition(
        unit="ns", better="lower",
        text="CPU time of `evict_lru(count)` from Python over the blocks it removed. `num_leaves` blocks hang by 64 below as "
        "many others as that takes, and were looked up in random order; about half of them are evicted. Median of the calls.",
    ),
}  # fmt: skip


def run(seed: int, num_leaves: int, count: int, block_size: int) -> dict[str, float]:
    if num_leaves < 1 or count < 1:
        raise ValueError(f"num_leaves is {num_leaves} and count {count}; allowed are 1 and more")
    times: list[float] = []
    while len(times) < MIN_CALLS:
        times.extend(_evictions(np.random.default_rng([seed, len(times)]), num_leaves, count, block_size))
    return {"prefix_eviction_ns_per_block": float(np.median(times))}


def _evictions(random: np.random.Generator, num_leaves: int, count: int, block_size: int) -> Iterator[float]:
    """ns a block, of each call."""
    from sagellm.prefix_reuse import PrefixReuseIndex

    index = PrefixReuseIndex(block_size)
    tokens = random.integers(0, 1 << 17, (num_leaves, 2 * block_size), np.int32)
    tokens[:, 0] = np.arange(num_leaves) // SIBLINGS  # which is all that tells one parent from another
    tokens[:, 1:block_size] = 0
    tokens[:, block_size] = np.arange(num_leaves) % SIBLINGS
    block_ids = np.stack([num_leaves + np.arange(num_leaves) // SIBLINGS, np.arange(num_leaves)], 1).astype(np.int32)
    for row in random.permutation(num_leaves):
        index.insert(tokens[row], block_ids[row])
    for row in random.permutation(num_leaves):
        index.lookup(tokens[row])
    for _ in range(max(num_leaves // 2 // count, 1)):
        removed: list[Any] = []
        taken = spent(lambda removed=removed: removed.append(index.evict_lru(count)))
        yield taken.cpu_ns / len(removed[0].kv_block_ids)
