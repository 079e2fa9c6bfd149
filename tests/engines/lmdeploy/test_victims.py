"""Choosing victims, hearing of evictions, the recency clock and block information, on a running engine."""

import numpy as np
import pytest

from sagellm.core.errors import PluginError
from sagellm.core.hooks import BlockState, EvictionReason, Tier
from sagellm.engines.base import SamplingParams
from tests.engines.lmdeploy.test_exactness import CROWD, answers
from tests.plugins import plugin_of
from tests.pool import cached_blocks
from tests.reference import make_prompts

LISTENER = "tests.plugins:Listener"
# Each fills five blocks with its answer; the smallest pool has 16, so the fourth takes all those of another.
FOUR = make_prompts((65, 65, 65, 65))
SHORT = SamplingParams(max_new_tokens=16, ignore_eos=True)


def hits_after_one_too_many(engine, prompt):
    for each in FOUR:
        engine.generate([each], SHORT)
    before = engine.hooks.report()["prefix"]["hit_tokens"]
    engine.generate([prompt], SHORT)
    return engine.hooks.report()["prefix"]["hit_tokens"] - before


@pytest.mark.parametrize(
    ("plugins", "first", "third"), [((), 0, 64), (("tests.plugins:MostRecentFirst",), 64, 0)], ids=["lru", "mru"]
)
def test_the_policy_decides_what_still_hits(start_engine, plugins, first, third):
    # All of this happens within a second, so the built-in policy also proves that the clock orders accesses finely.
    assert hits_after_one_too_many(start_engine(*plugins, kv_blocks=16), FOUR[0]) == first
    assert hits_after_one_too_many(start_engine(*plugins, kv_blocks=16), FOUR[2]) == third


def test_a_chosen_policy_does_not_change_the_output(start_engine, reference):
    engine = start_engine("tests.plugins:MostRecentFirst", kv_blocks=30)
    for _ in range(2):
        assert answers(engine, CROWD) == reference(CROWD, 40)
    report = engine.hooks.report()
    assert report["faults"] == []
    assert ["tests.plugins:MostRecentFirst", "select_victims"] in [row[:2] for row in report["calls"]]


def test_notices_of_eviction(start_engine, reference):
    engine = start_engine(LISTENER, kv_blocks=30)
    assert answers(engine, CROWD) == reference(CROWD, 40)
    listener = plugin_of(engine)
    evicted = engine.hooks.report()["evicted"]
    for reason in (EvictionReason.PREFIX, EvictionReason.RECOMPUTE):
        notices = [notice for notice in listener.evicted if notice.reason is reason]
        assert sum(len(notice.block_ids) for notice in notices) == evicted[reason.value] > 0
        assert all((notice.request_id is None) == (reason is EvictionReason.PREFIX) for notice in notices)
    assert listener.by_callback == listener.evicted
    wanted = {EvictionReason.PREFIX: BlockState.CACHED, EvictionReason.RECOMPUTE: BlockState.ACTIVE}
    for notice, states in zip(listener.evicted, listener.states_when_evicted, strict=True):
        assert len(set(notice.block_ids)) == len(notice.block_ids)
        assert set(states) <= {wanted[notice.reason]}, "told too late: the blocks were free already"


def test_what_was_evicted_and_stored_adds_up_to_what_is_cached(start_engine):
    engine = start_engine(LISTENER, kv_blocks=30)
    answers(engine, CROWD)
    listener = plugin_of(engine)
    stored = {block for update in listener.stored for block in update.block_ids}
    assert cached_blocks(engine) <= stored
    gone = {block for notice in listener.evicted for block in notice.block_ids}
    assert stored - gone <= cached_blocks(engine)


def test_accesses_within_a_second_are_ordered(start_engine):
    engine = start_engine()
    engine.generate([FOUR[0]], SHORT)
    first = cached_blocks(engine)
    engine.generate([FOUR[1]], SHORT)
    second = cached_blocks(engine) - first
    access = {info.block_id: info.last_access for info in engine.hooks.kv.info()}
    assert max(access[block] for block in first) < min(access[block] for block in second)
    engine.generate([FOUR[0]], SHORT)
    access = {info.block_id: info.last_access for info in engine.hooks.kv.info()}
    assert min(access[block] for block in first) > max(access[block] for block in second)


def test_block_information(start_engine):
    engine = start_engine("tests.plugins:AtAdmission")
    plugin = plugin_of(engine)
    seen = {}

    def look(handle):
        seen["counts"] = handle.block_counts()
        seen["all"] = handle.get_block_info()
        seen["some"] = handle.get_block_info([0, 63])
        for bad in ([64], [-1]):
            with pytest.raises(PluginError, match="allowed are 0 to 63"):
                handle.get_block_info(bad)
        seen["size"] = (handle.block_size, handle.block_bytes)

    engine.generate([FOUR[0]], SHORT)
    cached = cached_blocks(engine)
    plugin.jobs.append(look)
    engine.generate([FOUR[1]], SHORT)
    counts = seen["counts"]
    assert (counts.total, counts.free, counts.cached, counts.active) == (64, 64 - len(cached), len(cached), 0)
    assert {info.block_id for info in seen["all"]} == cached
    for info in seen["all"]:
        assert (info.tier, info.state, info.ref_count) == (Tier.GPU, BlockState.CACHED, 1)
        assert info.size_bytes == engine.info.kv_schema.block_bytes
    assert [info.block_id for info in seen["some"]] == [0, 63]
    assert seen["size"] == (16, engine.info.kv_schema.block_bytes)
    caches = engine.engine.executor.model_agent.cache_engine.full_gpu_cache
    assert sum(cache[:, 0].numel() * cache.element_size() for cache in caches) == engine.info.kv_schema.block_bytes


def test_the_handle_works_inside_a_hook_only(start_engine):
    engine = start_engine(LISTENER)
    with pytest.raises(PluginError, match="inside a hook only"):
        plugin_of(engine).engine.block_counts()


def test_arrays_given_to_a_plugin_are_read_only(start_engine):
    engine = start_engine("tests.plugins:MostRecentFirst", kv_blocks=16)
    given = []
    plugin = plugin_of(engine)
    original = type(plugin).select_victims

    def spy(request):
        given.append(request)
        return original(plugin, request)

    plugin.select_victims = spy
    for each in FOUR:
        engine.generate([each], SHORT)
    assert given
    for request in given:
        arrays = [request.block_ids, request.parent_ids, request.last_access, request.depth, request.on_device]
        assert not any(array.flags.writeable for array in arrays)
        assert {len(array) for array in arrays} == {len(request.block_ids)}
        assert np.unique(request.block_ids).size == request.block_ids.size
        depth = dict(zip(request.block_ids.tolist(), request.depth.tolist(), strict=True))
        for block, parent in zip(request.block_ids.tolist(), request.parent_ids.tolist(), strict=True):
            assert parent == -1 or depth[block] == depth[parent] + 16
