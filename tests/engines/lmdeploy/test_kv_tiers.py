"""Tiers below the engine's pool: what was evicted comes back with the bytes it had, whatever fails on the way."""

import pytest

from sagellm.core.config import KVConfig
from sagellm.core.errors import SageError
from sagellm.engines.base import SamplingParams
from tests.engines.lmdeploy.test_exactness import CROWD, NUM_NEW, answers
from tests.engines.lmdeploy.test_kv_policy import shared_prompts
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


def disk_engine(start_engine, folder, **values):
    kv = KVConfig(migration="always", disk=folder, deadline_s=10.0)
    return start_engine(**(dict(kv_blocks=24, host_kv_blocks=16, kv=kv) | values))


def test_what_the_host_gives_up_comes_back_from_files(start_engine, reference, tmp_path):
    engine = disk_engine(start_engine, tmp_path / "tier")
    for _ in range(3):
        for chat in CHATS:
            assert answers(engine, [chat], SHORT) == reference([chat], 8)
            check_pool(engine)
    assert hit_tokens(engine) > 144 * len(CHATS)
    assert engine.hooks.report()["faults"] == []


def test_files_outlive_the_engine(start_engine, reference, tmp_path):
    engine = disk_engine(start_engine, tmp_path / "tier")
    for chat in CHATS * 2:
        answers(engine, [chat], SHORT)
    engine.close()
    engine = disk_engine(start_engine, tmp_path / "tier")
    assert answers(engine, CHATS[:1], SHORT) == reference(CHATS[:1], 8)
    assert hit_tokens(engine) > 0


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
