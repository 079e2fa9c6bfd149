"""The real pool as a backend: a plug-in reserves blocks of it, and `/metrics` shows what became of the pool."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sagellm.core.errors import CapacityError, PluginError
from sagellm.core.hooks import MigrationPlan, Tier
from sagellm.core.service import ServiceRequest
from sagellm.engines.base import SamplingParams
from sagellm.serve.metrics import families
from tests.engines.lmdeploy.test_exactness import answers
from tests.engines.lmdeploy.test_host_blocks import at_admission
from tests.engines.lmdeploy.test_migration import AT_ADMISSION, LONG, SHORT, offload
from tests.engines.lmdeploy.test_service import generate
from tests.pool import check_pool


@pytest.fixture
def engine(start_engine):
    return start_engine(AT_ADMISSION, kv_blocks=32, host_kv_blocks=16)


def metrics(engine):
    class Once:
        def collect(self):
            return families(engine.hooks.report())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    lines = generate_latest(registry).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_a_plugin_allocates_and_frees_blocks_of_the_pool(engine):
    def job(handle):
        before = handle.block_counts()
        got = handle.allocate_blocks(5)
        assert got.tier is Tier.GPU and len(set(got.block_ids)) == 5
        assert handle.block_counts().free == before.free - 5
        assert handle.get_utilization() == pytest.approx((32 - before.free + 5) / 32)
        with pytest.raises(CapacityError, match="cannot allocate 100 blocks"):
            handle.allocate_blocks(100)
        with pytest.raises(PluginError, match="ask for 0 or more"):
            handle.allocate_blocks(-1)
        with pytest.raises(PluginError, match="name allocated blocks of yours"):
            handle.free_blocks([*got.block_ids, 31 if 31 not in got.block_ids else 0])
        assert handle.block_counts().free == before.free - 5
        handle.free_blocks(got.block_ids[:2])
        return got.block_ids[2:]

    kept = at_admission(engine, job)
    assert engine.hooks.kv.pool.reserved == list(kept)
    shown = metrics(engine)
    assert shown["sagellm_kv_reserved_blocks"] == "3.0"
    assert shown['sagellm_kv_operation_seconds_count{operation="allocate"}'] == "1.0"
    assert shown['sagellm_kv_operation_seconds_count{operation="free"}'] == "1.0"
    at_admission(engine, lambda handle: handle.free_blocks(kept))
    assert engine.hooks.kv.pool.reserved == []
    check_pool(engine)


def test_fragmentation_counts_slots_without_a_token(engine):
    def job(handle):
        empty = handle.get_fragmentation()
        used = round(32 * handle.get_utilization())
        blocks = handle.allocate_blocks(4).block_ids
        fragmented = handle.get_fragmentation()
        handle.free_blocks(blocks)
        return empty, used, fragmented

    answers(engine, [LONG], SHORT)
    empty, used, fragmented = at_admission(engine, job)
    assert fragmented == pytest.approx((empty * used + 4) / (used + 4))
    assert fragmented > empty


def test_reserved_blocks_come_back_when_the_plugin_is_switched_off(engine):
    at_admission(engine, lambda handle: handle.allocate_blocks(3))
    engine.hooks._host.blame("admit", "a planted fault")
    answers(engine, [LONG], SHORT)
    assert engine.hooks.kv.pool.reserved == []


def test_copies_have_a_bandwidth_and_moves_a_latency(engine):
    answers(engine, [LONG], SHORT)
    path = engine.hooks.cache.path(np.array(LONG), "").tolist()
    at_admission(engine, offload(path, []))
    shown = metrics(engine)
    assert shown['sagellm_kv_operation_seconds_count{operation="migrate"}'] == "1.0"
    size = engine.info.kv_schema.block_bytes
    assert float(shown['sagellm_kv_migration_bytes_total{direction="gpu->cpu"}']) == len(path) * size
    assert float(shown['sagellm_kv_migration_seconds_total{direction="gpu->cpu"}']) > 0


def test_blocks_know_their_tenant(engine):
    generate(engine, ServiceRequest(tenant="guest"), prompt=LONG)
    path = engine.hooks.cache.path(np.array(LONG), "").tolist()
    assert {row.tenant_id for row in engine.hooks.kv.info(path)} == {"guest"}
    at_admission(engine, lambda handle: handle.drop_blocks(range(32)))

    def reserve_all(handle):
        blocks = handle.allocate_blocks(handle.block_counts().free).block_ids
        tenants = {row.tenant_id for row in handle.get_block_info(blocks)}
        handle.free_blocks(blocks)
        return tenants

    assert at_admission(engine, reserve_all) == {""}, "blocks that others have now"


def test_the_pool_is_the_backend_of_the_contract(engine):
    pool = engine.hooks.kv.pool
    answers(engine, [LONG], SamplingParams(max_new_tokens=1))
    path = engine.hooks.cache.path(np.array(LONG), "").tolist()
    assert (pool.capacity(Tier.GPU), pool.capacity(Tier.CPU), pool.capacity(Tier.NVME)) == (32, 16, 0)
    free = pool.num_free(Tier.GPU)
    result = pool.migrate(MigrationPlan(Tier.GPU, Tier.CPU, (path[-1],)))
    assert result.moved == (path[-1],) and pool.num_free(Tier.CPU) == 15 and pool.num_free(Tier.GPU) == free + 1
    pool.drop(Tier.GPU, [path[-1], path[-2]])
    assert pool.num_free(Tier.GPU) == free + 2
