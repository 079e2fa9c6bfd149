"""A policy of the user's sees the tier's blocks, and those of each tenant, when it chooses victims in the engine."""

from sagellm.core.config import KVConfig
from sagellm.kv_policy.eviction.lru import Lru
from tests.engines.lmdeploy.test_exactness import CROWD, NUM_NEW, answers

SEEN = []


class Watcher(Lru):
    def select_victims(self, context):
        SEEN.append((context.pool_stats, context.tenant_stats))
        return super().select_victims(context)


def test_a_policy_reads_the_tier(start_engine, reference):
    SEEN.clear()
    engine = start_engine(kv_blocks=30, kv=KVConfig(policy=f"{__name__}:Watcher"))
    assert answers(engine, CROWD) == reference(CROWD, NUM_NEW)
    assert engine.hooks.report()["faults"] == []
    assert SEEN
    for pool, tenants in SEEN:
        assert pool.used + pool.free == pool.capacity <= 30
        assert 0 <= pool.pinned <= sum(tenants.values()) <= pool.used
    assert any(pool.pinned for pool, _ in SEEN)
