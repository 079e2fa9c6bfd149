"""An eviction policy by itself: what an access and a replayed block take."""

from typing import Any

import numpy as np

from benchmarks.policies.workload import sessions, zipf
from benchmarks.process_cost import spent
from benchmarks.result import Definition

OPTIONS: dict[str, Any] = {
    "policy": "lru", "capacity": 1_000, "num_objects": 100_000, "num_requests": 1_000_000, "num_rows": 5_000,
}  # fmt: skip
DEFINITIONS = {
    "kv_policy_ns_per_access": Definition(
        unit="ns", better="lower",
        text="CPU time of `ObjectCache.access_many` over its requests, the second half of `num_requests`; the first half fills "
        "the cache. Objects by Zipf's law with power 1.",
    ),
    "kv_policy_single_ns_per_access": Definition(
        unit="ns", better="lower",
        text="CPU time of `ObjectCache.access` in a loop of Python over its requests, the last tenth of `num_requests`.",
    ),
    "kv_policy_prefix_ns_per_block": Definition(
        unit="ns", better="lower",
        text="CPU time of `replay_prefix` over the blocks of its `num_rows` requests, which go on with sessions that grow.",
    ),
    "kv_policy_hit_rate": Definition(
        unit="1", better="higher", text="Hits of the requests that `kv_policy_ns_per_access` is measured with.",
    ),
}  # fmt: skip


def run(seed: int, policy: str, capacity: int, num_objects: int, num_requests: int, num_rows: int) -> dict[str, float]:
    from sagellm import _core

    keys = zipf(seed, num_requests, num_objects, 1.0)
    options = {"future": keys} if policy == "belady" else {}
    cache = _core.ObjectCache(policy, capacity, options)
    half, tenth = num_requests // 2, num_requests // 10
    hits: list[np.ndarray] = [cache.access_many(keys[:half])]
    batch = spent(lambda: hits.append(cache.access_many(keys[half:])))
    cache, numbers = _core.ObjectCache(policy, capacity, options), keys[num_requests - tenth :].tolist()
    cache.access_many(keys[: num_requests - tenth])

    def loop() -> None:
        access = cache.access
        for number in numbers:
            access(number)

    single = spent(loop)
    rows = sessions(seed, num_rows, max(num_rows // 20, 1), 4)
    prefix = spent(lambda: _core.replay_prefix(policy, capacity, rows.keys, rows.offsets))
    return {
        "kv_policy_ns_per_access": batch.cpu_ns / (num_requests - half),
        "kv_policy_single_ns_per_access": single.cpu_ns / tenth,
        "kv_policy_prefix_ns_per_block": prefix.cpu_ns / len(rows.keys),
        "kv_policy_hit_rate": float(hits[1].mean()),
    }
