"""Bytes of host blocks that a plug-in reads, and those that it brings: the same as the pool's, and they hit."""

import numpy as np
import pytest
import torch

from sagellm.core.errors import PluginError
from sagellm.core.hooks import EvictionDecision, MigrationPlan, Plugin, Tier
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.host_memory import cache_engine_of, open_host_cache
from tests.engines.lmdeploy.test_exactness import CROWD, answers
from tests.engines.lmdeploy.test_migration import AT_ADMISSION, LONG, OTHER, SHORT, block_bytes, offload
from tests.plugins import plugin_of
from tests.pool import cached_blocks, check_pool

DICT_TIER = "tests.engines.lmdeploy.books:DictTier"


def at_admission(engine, job):
    """Return the result of the job, which runs with the engine's handle while OTHER waits."""
    results = []
    plugin_of(engine).jobs = [lambda handle: results.append(job(handle))]
    answers(engine, [OTHER], SHORT)
    assert engine.hooks.report()["faults"] == [], engine.hooks._host.faults
    return results[0]


def read(blocks):
    return lambda handle: handle.host_bytes(blocks)


def flat(tensors):
    return np.concatenate([tensor.contiguous().view(torch.uint8).reshape(-1).numpy() for tensor in tensors])


@pytest.fixture
def engine(start_engine):
    return start_engine(AT_ADMISSION, kv_blocks=32, host_kv_blocks=16)


def offloaded(engine):
    """(blocks of LONG in order, their bytes); they lie on the host, and their copies have been made."""
    answers(engine, [LONG], SHORT)
    path = engine.hooks.cache.path(np.array(LONG), "").tolist()
    before = block_bytes(engine, path)
    at_admission(engine, offload(path, []))
    return path, before


def test_the_bytes_are_those_that_were_in_the_pool(engine):
    path, before = offloaded(engine)
    copies = at_admission(engine, read(path))
    for block, copy in zip(path, copies, strict=True):
        assert copy.dtype == np.uint8 and copy.shape == (engine.info.kv_schema.block_bytes,)
        assert np.array_equal(copy, flat(before[block])) and copy.any()


def test_what_cannot_be_read(engine):
    answers(engine, [LONG], SHORT)
    path = engine.hooks.cache.path(np.array(LONG), "").tolist()

    def job(handle):
        for blocks, message in (([path[0]], "not on the host tier"), ([1000], "is not cached"), ([-1], "is not cached")):
            with pytest.raises(PluginError, match=message):
                handle.host_bytes(blocks)
        with pytest.raises(PluginError, match="name blocks that reserve_host gave you"):
            handle.free_host(path[:1])
        with pytest.raises(PluginError, match="request 77 is unknown"):
            handle.request_tokens(77)

    at_admission(engine, job)


def test_a_copy_that_was_not_sent_yet_is_read_from_the_pool(engine):
    answers(engine, [LONG], SHORT)
    path = engine.hooks.cache.path(np.array(LONG), "").tolist()
    before = block_bytes(engine, path)

    def job(handle):
        handle.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, tuple(path)))
        return handle.host_bytes(path)

    for block, copy in zip(path, at_admission(engine, job), strict=True):
        assert np.array_equal(copy, flat(before[block])) and copy.any()


def test_no_bytes_of_a_copy_that_is_under_way(engine):
    """From when a pass is sent until it has ended, neither side of its copies is read."""
    answers(engine, [LONG], SHORT)
    kv, path = engine.hooks.kv, engine.hooks.cache.path(np.array(LONG), "").tolist()

    def job(handle):
        handle.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, tuple(path)))
        number, ins, outs = kv.take_swaps()
        with pytest.raises(PluginError, match="still on its way"):
            handle.host_bytes(path[:1])
        kv.host_blocks.ended(number)
        assert len(handle.host_bytes(path[:1])) == 1 and not ins
        handle.migrate_blocks(MigrationPlan(Tier.CPU, Tier.GPU, tuple(path)))
        number, ins, outs = kv.take_swaps()
        handle.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, tuple(path)))
        with pytest.raises(PluginError, match="still on its way"):
            handle.host_bytes(path[:1])
        kv.host_blocks.ended(number)
        assert len(handle.host_bytes(path[:1])) == 1 and len(ins) == len(path) and not outs
        handle.drop_blocks(path)  # their copies have not been made

    at_admission(engine, job)
    check_pool(engine)


def test_no_host_tier(start_engine):
    engine = start_engine(AT_ADMISSION)

    def job(handle):
        with pytest.raises(PluginError, match="there is no host tier"):
            handle.reserve_host(1)

    at_admission(engine, job)


def test_memory_of_other_processes():
    """With tensor parallelism the executor of this process has no model."""
    with pytest.raises(PluginError, match=r"the workers' own \(tensor_parallel above 1\)"):
        open_host_cache(cache_engine_of(object()), 4, 1024)


def test_a_prefix_that_was_lost_comes_back_from_its_bytes(engine, reference):
    path, _ = offloaded(engine)
    copies = at_admission(engine, read(path))

    def forget(handle):
        kv, cache = engine.hooks.kv, engine.hooks.cache
        kv.give_up(cache.evict(np.array(path), Tier.CPU), "test", "all of LONG")
        kv.give_up(cache.evict(cache.candidates().block_ids), "test", "the rest")

    at_admission(engine, forget)
    assert engine.hooks.kv.counts().host_used == 0

    def bring(handle):
        tokens, namespace = np.array(LONG[:96]), ""
        ids, buffers = handle.reserve_host(6)
        for buffer, copy in zip(buffers, copies, strict=False):
            buffer[:] = copy
        with pytest.raises(PluginError, match="cannot be the last ones"):
            handle.adopt_host(ids, tokens[:90], namespace)
        # The end before the beginning: it could never be found.
        assert handle.adopt_host(ids[3:], tokens, namespace) == ()
        assert handle.adopt_host(ids[:3], tokens[:48], namespace) == tuple(ids[:3])
        ids_again, buffers = handle.reserve_host(4)
        for buffer, copy in zip(buffers, copies[2:], strict=False):
            buffer[:] = copy
        # The first of these is cached by now.
        assert handle.adopt_host(ids_again, tokens, namespace) == tuple(ids_again[1:])
        return handle.request_tokens(engine.hooks._scheduler.waiting[0].session_id)

    tokens, namespace = at_admission(engine, bring)
    assert (tokens.tolist(), namespace) == (list(OTHER), "")
    check_pool(engine)
    assert engine.hooks.kv.counts().host_used == 6
    hit = engine.hooks.report()["prefix"]["hit_tokens"]
    assert answers(engine, [LONG], SHORT) == reference([LONG], 16)
    assert engine.hooks.report()["prefix"]["hit_tokens"] - hit == 96
    now = engine.hooks.cache.path(np.array(LONG), "").tolist()
    for block, copy in zip(now, copies, strict=True):
        assert np.array_equal(flat(block_bytes(engine, [block])[block]), copy)


class Hoards(Plugin):
    """Reserves the host tier, and then fails."""

    def attach(self, engine):
        self.engine = engine

    def admit(self, request):
        self.engine.reserve_host(100)
        raise RuntimeError("planted")

    def select_victims(self, request):
        return EvictionDecision(())


def test_what_a_plugin_reserved_is_free_once_it_is_off(start_engine):
    engine = start_engine("tests.engines.lmdeploy.test_host_blocks:Hoards", host_kv_blocks=8)
    for _ in range(2):
        answers(engine, [OTHER], SHORT)
    assert engine.hooks.report()["faults"][0][1:] == ["admit", "raised", 1]
    assert engine.hooks.kv.counts().host_used == 0


def test_a_third_tier_under_pressure(start_engine, reference, tmp_path):
    """More prompts than the pool and the host tier hold come back from a dictionary, and the answers are exact."""
    engine = start_engine(DICT_TIER, kv_blocks=30, host_kv_blocks=6, record=tmp_path / "events.jsonl")
    for _ in range(2):
        assert answers(engine, CROWD) == reference(CROWD, 40)
        check_pool(engine)
    for prompt, wanted in zip(CROWD, reference(CROWD, 40), strict=True):
        assert answers(engine, [prompt]) == [wanted]
    tier, report = plugin_of(engine), engine.hooks.report()
    assert report["faults"] == [] and tier.mismatches == []
    assert tier.saved and tier.adopted and report["migrated"]["gpu"]


def test_steps_say_what_they_cost(start_engine):
    engine = start_engine("tests.engines.lmdeploy.test_host_blocks:MovesAndListens", kv_blocks=32, host_kv_blocks=16)
    for prompt in (LONG, OTHER, LONG):
        answers(engine, [prompt], SamplingParams(max_new_tokens=4, ignore_eos=True))
    steps = plugin_of(engine).steps
    size = engine.info.kv_schema.block_bytes
    assert all(step.duration_s > 0 for step in steps)
    moved = [step for step in steps if step.bytes_in or step.bytes_out]
    assert moved and all(step.swap_s > 0 and (step.bytes_in + step.bytes_out) % size == 0 for step in moved)
    assert sum(step.bytes_out for step in steps) == engine.hooks.report()["migrated"]["cpu"] * size
    assert sum(step.bytes_in for step in steps) == engine.hooks.report()["migrated"]["gpu"] * size
    decodes = [step.num_context_tokens for step in steps if step.phase == "decode"]
    assert decodes[:3] == [100, 101, 102]
    assert cached_blocks(engine)


class MovesAndListens(Plugin):
    def attach(self, engine):
        self.engine, self.steps = engine, []

    def admit(self, request):
        blocks = tuple(info.block_id for info in self.engine.get_block_info())
        self.engine.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, blocks))
        return True

    def on_step_end(self, result):
        self.steps.append(result)
