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


class LeastOften(Lru):
    """Evicts the block that was found least often, by the history."""

    def select_victims(self, context):
        self.histories = {key: context.access_history(key) for key in self._queue}
        context.take_in_order(sorted(self._queue, key=lambda key: len(self.histories[key])), lambda key: "seldom found")
        return context.decision()


def test_a_policy_reads_when_blocks_were_found():
    policy = LeastOften(3)
    requests = [1, 2, 3, 4, 1, 1, 4, 5]
    times = np.arange(8.0)
    PrefixReplay(
        policy, np.array(requests, np.uint64), np.arange(9), capacity=3, times_s=times
    ).run()
    # The first eviction, at 3 s, makes the history begin and takes block 1. It is 2's turn at 4 s, and then 3's.
    assert policy.histories == {1: (5.0,), 3: (), 4: (6.0,)}
