"""A policy sees the tier's blocks, and those of each tenant, in a replay."""

import numpy as np

from sagellm.kv_policy import PoolStats
from sagellm.kv_policy.eviction.lru import Lru
from sagellm.replay.prefix import PrefixReplay


class Watcher(Lru):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.seen = []

    def select_victims(self, context):
        self.seen.append((context.pool_stats, context.tenant_stats))
        return super().select_victims(context)


def test_a_policy_reads_the_tier():
    policy = Watcher(4)
    keys, offsets = np.array([1, 2, 3, 4, 5], np.uint64), np.array([0, 2, 4, 5], np.int64)
    PrefixReplay(policy, keys, offsets, capacity=4, running=2, tenants=("a", "b", "a")).run()
    # Before the third request the first one ends: block 1 stays pinned by block 2, and 3 and 4 by their request.
    assert policy.seen == [(PoolStats(capacity=4, used=4, free=0, pinned=3), {"a": 2, "b": 2})]
