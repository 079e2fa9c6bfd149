"""The prefix index on long shared prefixes (`benchmarks.prefix.workload`): lookups, insertion, memory."""

from typing import Any

import numpy as np

from benchmarks.prefix.worker import Worker
from benchmarks.result import Definition

OPTIONS: dict[str, Any] = {"block_size": 16, "num_sequences": 10_000, "num_lookups": 2_000}
ROUNDS = 20
DEFINITIONS = {
    "prefix_index_lookup_us": Definition(
        unit="us", better="lower",
        text="CPU time of one lookup from Python, to the block ids; `num_lookups` lookups of 3,480 tokens on average, 96% of "
        f"them cached, after `num_sequences` insertions. Median of {ROUNDS} passes over them, each right after another.",
    ),
    "prefix_index_ns_per_matched_token": Definition(
        unit="ns", better="lower", text="The same, over the tokens that were found."
    ),
    "prefix_index_insert_ns_per_token": Definition(
        unit="ns", better="lower", text="CPU time of the insertions over the tokens given, cached before or not."
    ),
    "prefix_index_bytes_per_token": Definition(
        unit="B", better="lower", text="Memory by the index's own account over the tokens it caches, each counted once."
    ),
}  # fmt: skip


def run(seed: int, block_size: int, num_sequences: int, num_lookups: int) -> dict[str, float]:
    if num_lookups < 1:
        raise ValueError(f"num_lookups is {num_lookups}; allowed are 1 and more")
    worker = Worker("sagellm", seed=seed, block_size=block_size, num_sequences=num_sequences, num_lookups=num_lookups)
    inserted, memory, check = worker.insert(1), worker.memory(), worker.check()
    if check["num_wrong"]:
        raise RuntimeError(f"the index is broken: {check['num_wrong']} wrong answers; {check['first']}")
    passes = [worker.lookup()["lookup"] for _ in range(ROUNDS)]
    return {
        "prefix_index_lookup_us": float(np.median([taken["cpu_ns"] / taken["num_lookups"] for taken in passes])) / 1e3,
        "prefix_index_ns_per_matched_token": float(
            np.median([row["cpu_ns"] / row["matched_tokens"] for row in passes])
        ),
        "prefix_index_insert_ns_per_token": inserted["cpu_ns"] / inserted["num_tokens"],
        "prefix_index_bytes_per_token": memory["own_bytes"] / memory["num_cached_tokens"],
    }
