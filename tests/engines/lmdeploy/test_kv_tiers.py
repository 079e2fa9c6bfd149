"""Tiers below the engine's pool: what was evicted comes back with the bytes it had, whatever fails on the way."""

import time

import numpy as np
import pytest

from sagellm.core.config import KVConfig, PluginSpec
from sagellm.core.errors import ConfigError, SageError
from sagellm.core.hooks import MigrationPlan, Plugin, Tier
from sagellm.engines.base import SamplingParams
from sagellm.replay.verify import verify_log
from tests.engines.lmdeploy.test_exactness import CROWD, NUM_NEW, answers
from tests.engines.lmdeploy.test_kv_policy import shared_prompts
from tests.plugins import plugin_of
from tests.pool import check_pool
from tests.reference import make_prompts

SHORT = SamplingParams(max_new_tokens=8, ignore_eos=True)
CHATS = make_prompts([160] * 6, seed=9)  # 60 blocks of 16 tokens


def hit_tokens(engine) -> int:
    return engine.hooks.report()["prefix"]["hit_tokens"]


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "prefix_reuse"])
def test_under_pressure_with_a_host_tier(start_engine, reference, policy):
    engine = start_engine(kv_blocks=30, host_kv_blocks=24, kv=KVConfig(policy=policy, migration="always"))
    for _ in range(3):
        assert answers(engine, CROWD) == reference(CROWD, NUM_NEW)
        check_pool(engine)
    report = engine.hooks.report()
    assert report["faults"] == []
    assert report["preempted"] > 0 and report["migrated"]["cpu"] > 0 and report["migrated"]["gpu"] > 0


def test_what_the_pool_gives_up_comes_back_from_the_host(start_engine, reference):
    with_tier = start_engine(kv_blocks=24, host_kv_blocks=80, kv=KVConfig(migration="always"))
    without = start_engine(kv_blocks=24)
    for engine in (with_tier, without):
        for _ in range(2):
            for chat in CHATS:
                assert answers(engine, [chat], SHORT) == reference([chat], 8)
    assert hit_tokens(with_tier) == 144 * len(CHATS), "all full blocks but the one with the last token"
    assert hit_tokens(without) < hit_tokens(with_tier) / 2
    assert with_tier.hooks.report()["faults"] == []


def served_in_turn(engine, reference):
    """Tokens that hit of each chat, one after the other; nothing is on its way to files when the next one comes."""
    found = []
    for chat in CHATS:
        before = hit_tokens(engine)
        assert answers(engine, [chat], SHORT) == reference([chat], 8)
        check_pool(engine)
        found.append(hit_tokens(engine) - before)
        migrator = plugin_of(engine)._link.migrator
        while migrator.queued_bytes(Tier.CPU, Tier.NVME):
            time.sleep(0.001)
    return found


def disk_engine(start_engine, folder, **values):
    kv = KVConfig(migration="always", disk=folder, deadline_s=10.0)
    return start_engine(**(dict(kv_blocks=24, host_kv_blocks=16, kv=kv) | values))


def test_what_the_host_gives_up_comes_back_from_files(start_engine, reference, tmp_path):
    """Six chats of 10 blocks take turns in 24 + 16 blocks, so by its next turn most of a chat lies in files. All nine blocks
    before the one with the last token come back. A load is never larger than the host tier. A block that leaves the host tier
    for a load, or for the pool's victims, goes to a file unless it has one. Only the end of a chat, which no request asks for,
    finds no room on a lower tier.
    """
    log = tmp_path / "log.jsonl"
    engine = disk_engine(start_engine, tmp_path / "tier", record=log)
    assert served_in_turn(engine, reference) == [0] * len(CHATS)
    for _ in range(2):
        assert served_in_turn(engine, reference) == [144] * len(CHATS)
    plugin, report = plugin_of(engine), engine.hooks.report()
    assert report["faults"] == [] and plugin.report()["events"]["loaded"] >= 80
    assert not plugin._counts["saves_not_copied"] and not plugin._counts["loads_without_room"]
    engine.close()
    assert verify_log(log).agrees


def test_two_who_begin_with_the_same_files_share_a_load(start_engine, reference, tmp_path, monkeypatch):
    engine = disk_engine(start_engine, tmp_path / "tier")
    served_in_turn(engine, reference)
    plugin, read = plugin_of(engine), plugin_of(engine)._link.store.read

    def read_once_both_wait(*args, **kwargs):
        while not plugin._counts["loads_shared"]:
            time.sleep(0.001)
        return read(*args, **kwargs)

    monkeypatch.setattr(plugin._link.store, "read", read_once_both_wait)
    tails = make_prompts([20, 30], seed=11)
    pair = [CHATS[0][:144] + tail for tail in tails]
    before = hit_tokens(engine)
    assert answers(engine, pair, SHORT) == reference(pair, 8)
    assert hit_tokens(engine) - before == 2 * 144 and plugin.report()["events"]["loaded"] == 9
    assert plugin._counts["loads_shared"] == 1


def test_a_deadline_longer_than_the_engine_s_patience_is_refused(start_engine, tmp_path):
    with pytest.raises(ConfigError, match=r"kv.deadline_s 60.*give at most 59"):
        disk_engine(start_engine, tmp_path / "tier", kv=KVConfig(disk=tmp_path / "tier", deadline_s=60))


def test_files_outlive_the_engine(start_engine, reference, tmp_path):
    engine = disk_engine(start_engine, tmp_path / "tier")
    for chat in CHATS * 2:
        answers(engine, [chat], SHORT)
    engine.close()
    engine = disk_engine(start_engine, tmp_path / "tier")
    assert answers(engine, CHATS[:1], SHORT) == reference(CHATS[:1], 8)
    assert hit_tokens(engine) > 0


@pytest.mark.slow
def test_a_crowd_on_three_tiers(start_engine, reference, tmp_path):
    prompts = shared_prompts(5, 60)
    engine = disk_engine(start_engine, tmp_path / "tier", kv_blocks=30)
    for _ in range(2):
        assert answers(engine, prompts, SHORT) == reference(prompts, 8)
        check_pool(engine)
    assert engine.hooks.report()["faults"] == []


def test_another_model_s_files_are_not_served(start_engine, reference, tmp_path):
    engine = disk_engine(start_engine, tmp_path / "tier")
    for chat in CHATS * 2:
        answers(engine, [chat], SHORT)
    engine.close()
    other = disk_engine(start_engine, tmp_path / "tier", model="qwen2")
    for chat in CHATS:
        assert answers(other, [chat], SHORT) == reference([chat], 8, "qwen2")


def test_a_second_engine_on_the_same_folder_is_refused(start_engine, tmp_path):
    disk_engine(start_engine, tmp_path / "tier")
    with pytest.raises(SageError, match="tier"):
        disk_engine(start_engine, tmp_path / "tier")

class Chooses(Plugin):
    """Answers the candidate at this place: the longest first."""

    def __init__(self, place):
        self.place, self.seen = place, []

    def attach(self, engine):
        self.engine = engine

    def lookup_prefix(self, query):
        self.seen.append(self.engine.prefix_candidates(query.token_ids, query.namespace))
        return self.seen[-1][self.place].block_ids if self.seen[-1] else ()


@pytest.mark.parametrize("place, num_back, num_hits", [(0, 2, 4), (1, 0, 2)])
def test_a_plugin_chooses_among_the_matches_on_all_tiers(start_engine, reference, place, num_back, num_hits):
    prompt = make_prompts((70,), seed=9)
    engine = start_engine(PluginSpec(name=f"{__name__}:Chooses", options={"place": place}), host_kv_blocks=8)
    assert answers(engine, prompt) == reference(prompt, 40)
    path = tuple(engine.hooks.cache.path(np.array(prompt[0][:64]), "").tolist())

    async def move():
        return engine.hooks.kv.migrate(MigrationPlan(Tier.GPU, Tier.CPU, path[2:]))

    assert engine._on_loop(move()).moved == path[2:]
    assert answers(engine, prompt) == reference(prompt, 40)
    longest, on_pool = plugin_of(engine).seen[-1]
    assert longest.block_ids == path and longest.tiers == (Tier.GPU, Tier.GPU, Tier.CPU, Tier.CPU)
    assert on_pool.block_ids == path[:2] and on_pool.tiers == (Tier.GPU, Tier.GPU)
    report = engine.hooks.report()
    assert report["migrated"]["gpu"] == num_back and report["prefix"]["hit_blocks"] == num_hits and not report["faults"]
