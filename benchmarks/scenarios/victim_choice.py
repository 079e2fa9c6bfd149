"""Choosing victims among cached blocks, the plain way: `VictimRequest.leaf_first` on a forest of prefixes."""

import time
from typing import Any

import numpy as np

from benchmarks.result import Definition
from sagellm.core.hooks import VictimRequest

OPTIONS: dict[str, Any] = {"num_blocks": 10_000, "count": 64, "depth": 16, "repeats": 20}
DEFINITIONS = {
    "victim_choice_cpu_us": Definition(
        unit="us", better="lower",
        text="CPU time of one leaf-first choice of `count` victims by last access among `num_blocks` cached blocks that "
        "form chains of `depth` blocks; median of `repeats`.",
    ),
}  # fmt: skip


def run(seed: int, num_blocks: int, count: int, depth: int, repeats: int) -> dict[str, float]:
    request = _forest(np.random.default_rng(seed), num_blocks, count, depth)
    times = []
    for _ in range(repeats):
        start_ns = time.thread_time_ns()
        victims = request.leaf_first()
        times.append((time.thread_time_ns() - start_ns) / 1e3)
        assert len(victims) == min(count, num_blocks)
    return {"victim_choice_cpu_us": float(np.median(times))}


def _forest(random: np.random.Generator, num_blocks: int, count: int, depth: int) -> VictimRequest:
    ids = random.permutation(num_blocks)
    level = np.arange(num_blocks) % depth
    parents = np.where(level > 0, np.roll(ids, 1), -1)
    # A parent is touched whenever its child is, so access times fall along a chain; ties do not occur.
    access = np.repeat(random.permutation(-(-num_blocks // depth)), depth)[:num_blocks] * depth + (depth - level)
    return VictimRequest(count, ids, parents, access, (level + 1) * 16, np.ones(num_blocks, bool))
