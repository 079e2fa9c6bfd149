"""Blocks that move to the host tier and back: the bytes are the same, nothing is lost, and they still hit."""

import numpy as np
import pytest
import torch

from sagellm.core.errors import PluginError
from sagellm.core.hooks import MigrationPlan, MigrationResult, Tier
from sagellm.engines.base import SamplingParams
from tests.engines.lmdeploy.test_exactness import CROWD, answers
from tests.plugins import plugin_of
from tests.pool import cached_blocks, check_pool, settle
from tests.reference import make_prompts
from tests.sweeps import slow_but

AT_ADMISSION = "tests.plugins:AtAdmission"
SHORT = SamplingParams(max_new_tokens=16, ignore_eos=True)
LONG, OTHER, THIRD = make_prompts((100, 20, 30))


def block_bytes(engine, blocks):
    """{block: a copy of its keys and values, all layers}, from the pool or the host cache, wherever it lies."""
    allocator = engine.engine.scheduler.block_manager.allocator
    cache = engine.engine.executor.model_agent.cache_engine
    pool = engine.info.num_kv_blocks
    found = {}
    for block in blocks:
        slot = int(allocator._log_mem.phy_map[block])
        tensors = cache.full_gpu_cache if slot < pool else cache.full_cpu_cache
        found[block] = [tensor[:, slot if slot < pool else slot - pool].clone() for tensor in tensors]
    return found


def assert_same_bytes(left, right):
    assert left.keys() == right.keys()
    for block in left:
        for one, two in zip(left[block], right[block], strict=True):
            assert one.abs().sum() > 0
            assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def tiers(engine, blocks):
    return {info.tier for info in engine.hooks.kv.info(sorted(blocks))}


def offload(blocks, results, keep_going=True):
    """A job that moves the blocks to the host."""

    def job(handle):
        results.append(handle.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, tuple(blocks))))
        return keep_going

    return job


def restore(blocks, results):
    return lambda handle: results.append(handle.migrate_blocks(MigrationPlan(Tier.CPU, Tier.GPU, tuple(blocks))))


@pytest.fixture
def engine(start_engine):
    return start_engine(AT_ADMISSION, kv_blocks=32, host_kv_blocks=16)


def test_there_and_back_bit_for_bit(engine, reference):
    assert answers(engine, [LONG], SHORT) == reference([LONG], 16)
    blocks = sorted(cached_blocks(engine))
    before = block_bytes(engine, blocks)
    free = engine.hooks.kv.counts().free
    results = []
    plugin_of(engine).jobs = [offload(blocks, results)]
    assert answers(engine, [OTHER], SHORT) == reference([OTHER], 16)
    assert results == [MigrationResult(tuple(blocks), {})]
    assert tiers(engine, blocks) == {Tier.CPU}
    assert_same_bytes(block_bytes(engine, blocks), before)
    counts = engine.hooks.kv.counts()
    others = len(cached_blocks(engine)) - len(blocks)
    assert (counts.host_used, counts.free) == (len(blocks), free + len(blocks) - others)
    check_pool(engine)

    plugin_of(engine).jobs = [restore(blocks, results)]
    assert answers(engine, [THIRD], SHORT) == reference([THIRD], 16)
    assert results[1] == MigrationResult(tuple(blocks), {})
    assert tiers(engine, blocks) == {Tier.GPU}
    assert_same_bytes(block_bytes(engine, blocks), before)
    assert engine.hooks.kv.counts().host_used == 0
    assert engine.hooks.report()["migrated"] == {"cpu": len(blocks), "gpu": len(blocks)}


def test_a_match_brings_blocks_back(engine, reference):
    answers(engine, [LONG], SHORT)
    blocks = sorted(cached_blocks(engine))
    before = block_bytes(engine, blocks)
    plugin_of(engine).jobs = [offload(blocks, [])]
    answers(engine, [OTHER], SHORT)
    hit = engine.hooks.report()["prefix"]["hit_tokens"]
    assert answers(engine, [LONG], SHORT) == reference([LONG], 16)
    assert engine.hooks.report()["prefix"]["hit_tokens"] - hit == 96
    assert engine.hooks.report()["migrated"]["gpu"] >= 6
    assert_same_bytes({b: v for b, v in block_bytes(engine, blocks).items() if b < 6}, {b: before[b] for b in range(6)})


def test_a_request_that_computes_an_offloaded_block_again(engine, reference):
    """The last block of a prompt is never matched. Computed again, it takes the place of the one on the host."""
    prompt = LONG[:64]
    answers(engine, [prompt], SHORT)
    path = engine.hooks.cache.path(np.array(prompt), "").tolist()
    plugin_of(engine).jobs = [offload(path, [])]
    answers(engine, [OTHER], SHORT)
    assert engine.hooks.kv.counts().host_used == 4
    assert answers(engine, [prompt], SamplingParams(40, ignore_eos=True)) == reference([prompt], 40)
    check_pool(engine)
    now = engine.hooks.cache.path(np.array(prompt), "").tolist()
    assert now[:3] == path[:3] and now[3] != path[3]
    assert tiers(engine, now) == {Tier.GPU} and engine.hooks.kv.counts().host_used == 0
    assert engine.hooks.report()["evicted"]["prefix"] == 1


def test_copies_wait_while_nothing_runs(engine, reference):
    """A plug-in that migrates and admits no request leaves a step without a forward pass. Its copies go with the next step."""
    answers(engine, [LONG], SHORT)
    blocks = sorted(cached_blocks(engine))
    before = block_bytes(engine, blocks)
    plugin_of(engine).jobs = [offload(blocks, [], keep_going=False), lambda handle: False]
    assert answers(engine, [OTHER], SHORT) == reference([OTHER], 16)
    assert_same_bytes(block_bytes(engine, blocks), before)
    assert answers(engine, [LONG], SHORT) == reference([LONG], 16)


def test_restored_and_offloaded_within_one_step(engine, reference):
    answers(engine, [LONG], SHORT)
    blocks = sorted(cached_blocks(engine))
    before = block_bytes(engine, blocks)
    results = []

    def there_back_there(handle):
        offload(blocks, results)(handle)
        restore(blocks, results)(handle)
        offload(blocks, results)(handle)

    plugin_of(engine).jobs = [there_back_there]
    answers(engine, [OTHER], SHORT)
    assert results[0].moved == results[1].moved == tuple(blocks)
    assert results[2].moved == () and set(results[2].refused.values()) == {"restored since the last forward pass"}
    assert_same_bytes(block_bytes(engine, blocks), before)
    assert answers(engine, [LONG], SHORT) == reference([LONG], 16)


def test_ids_may_be_numpy_numbers(start_engine, reference, tmp_path):
    """Also with a record, whose JSON knows none."""
    engine = start_engine(AT_ADMISSION, host_kv_blocks=4, record=tmp_path / "events.jsonl")
    answers(engine, [LONG], SHORT)
    blocks = np.array(sorted(cached_blocks(engine)))
    results = []

    def migrate(handle):
        results.append(handle.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, tuple(blocks))))

    plugin_of(engine).jobs = [migrate]
    assert answers(engine, [OTHER], SHORT) == reference([OTHER], 16)
    assert engine.hooks.report()["faults"] == []
    assert len(results[0].moved) == 4 and set(results[0].refused.values()) == {"the host tier is full"}


def test_the_host_tier_survives_what_frees_nothing(start_engine):
    """Room in the pool is made by evicting blocks of the pool, however old those on the host are."""
    engine = start_engine(AT_ADMISSION, host_kv_blocks=8)
    answers(engine, [LONG], SHORT)
    old = sorted(cached_blocks(engine))
    plugin_of(engine).jobs = [offload(old, [])]
    answers(engine, [OTHER], SHORT)
    before = engine.hooks.kv.counts()
    assert before.host_used == len(old) and before.cached > 0
    engine._on_loop(_call(lambda: engine.hooks.kv.evict(1)))
    after = engine.hooks.kv.counts()
    assert (after.host_used, after.free) == (before.host_used, before.free + 1)


async def _call(function):
    return function()


@pytest.mark.parametrize("round_trip", [False, True])
def test_evicted_before_its_copy_was_made(engine, reference, round_trip):
    answers(engine, [LONG], SHORT)
    blocks = sorted(cached_blocks(engine))
    kv = engine.hooks.kv

    def then_evict(handle):
        offload(blocks, [])(handle)
        if round_trip:
            restore(blocks, [])(handle)
        candidates = engine.hooks.cache.candidates()
        on = candidates.on_device
        for tier, ids in ((Tier.GPU, candidates.block_ids[on]), (Tier.CPU, candidates.block_ids[~on])):
            kv.give_up(engine.hooks.cache.evict(ids, tier), "test", "all of them")
        assert kv._ins == {}
        assert kv._outs == {}, "a copy would go to a slot that is free for others"

    plugin_of(engine).jobs = [then_evict]
    assert answers(engine, [OTHER], SHORT) == reference([OTHER], 16)
    assert engine.hooks.report()["faults"] == []
    check_pool(engine)
    assert not set(blocks) <= cached_blocks(engine)
    assert answers(engine, [LONG], SHORT) == reference([LONG], 16)


def test_what_cannot_move_is_refused_with_the_reason(start_engine):
    engine = start_engine(AT_ADMISSION, kv_blocks=32, host_kv_blocks=2)
    engine.generate([LONG], SHORT)
    blocks = sorted(cached_blocks(engine))
    free = next(block for block in range(32) if block not in blocks)
    results = []

    def job(handle):
        offload([*blocks[:3], free, 1000], results)(handle)
        offload(blocks[:1], results)(handle)
        restore(blocks[2:3], results)(handle)
        with pytest.raises(PluginError, match="cannot migrate gpu -> nvme; allowed: gpu -> cpu, cpu -> gpu"):
            handle.migrate_blocks(MigrationPlan(Tier.GPU, Tier.NVME, tuple(blocks)))

    plugin_of(engine).jobs = [job]
    engine.generate([OTHER], SHORT)
    assert results == [
        MigrationResult(
            tuple(blocks[:2]),
            {blocks[2]: "the host tier is full", free: "not a cached block", 1000: "not a cached block"},
        ),
        MigrationResult((), {blocks[0]: "already on the host"}),
        MigrationResult((), {blocks[2]: "not on the host"}),
    ]
    assert engine.hooks.report()["faults"] == []


def test_no_host_tier(start_engine):
    engine = start_engine(AT_ADMISSION, kv_blocks=32)
    engine.generate([LONG], SHORT)
    results = []
    plugin_of(engine).jobs = [offload([0], results)]
    engine.generate([OTHER], SHORT)
    assert results == [MigrationResult((), {0: "there is no host tier (host_kv_blocks is 0)"})]


def test_a_block_in_use_stays(engine):
    engine.generate([LONG], SHORT)
    results = []
    plugin_of(engine).jobs = [lambda handle: True, offload(range(6), results)]
    engine.generate([LONG, OTHER], SHORT, delays_s=[0, 0.01])
    settle(engine)
    if not results:
        pytest.fail("the second request was not asked for")
    assert set(results[0].refused.values()) <= {"in use by a request"}


@pytest.mark.parametrize("host_kv_blocks", slow_but([3, 20, 60], 3))
def test_offloading_instead_of_evicting_under_pressure(start_engine, reference, host_kv_blocks):
    engine = start_engine("tests.plugins:OffloadInstead", kv_blocks=30, host_kv_blocks=host_kv_blocks)
    for _ in range(3):
        assert answers(engine, CROWD) == reference(CROWD, 40)
        check_pool(engine)
    for prompt, wanted in zip(CROWD[:4], reference(CROWD[:4], 40), strict=True):
        assert answers(engine, [prompt]) == [wanted]
        check_pool(engine)
    report = engine.hooks.report()
    assert report["faults"] == []
    assert report["preempted"] > 0
    assert report["migrated"]["cpu"] > 0
    assert report["migrated"]["gpu"] > 0 or host_kv_blocks == 3
