"""Policy objects in the engine: the output stays exact, and a replay of the record makes every decision again."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from sagellm.core.config import KVConfig
from sagellm.core.errors import PluginError, PolicyError
from sagellm.engines.base import SamplingParams
from sagellm.kv_policy import policy_names
from sagellm.kv_policy.eviction.lru import Lru
from sagellm.replay.verify import verify_log
from tests.engines.lmdeploy.pd.pair import wait_until
from tests.engines.lmdeploy.test_exactness import CROWD, NUM_NEW, answers
from tests.reference import make_prompts
from tests.sweeps import slow_but

NUM_REQUESTS = 170  # benchmarks/kv_replay.py asks for more
SYSTEMS = make_prompts((48, 48, 33), seed=3)
DOCUMENTS = make_prompts((20, 47, 16, 80, 64, 31), seed=4)
ONLINE = [name for name in policy_names() if name != "belady"]  # belady wants to know the future


def shared_prompts(seed: int, count: int) -> list[list[int]]:
    """Systems with documents behind them, cut anywhere: some prompts repeat, most share a beginning."""
    draw = random.Random(seed)
    prompts = []
    for _ in range(count):
        text = draw.choice(SYSTEMS) + draw.choice(DOCUMENTS) + draw.choice(DOCUMENTS)
        prompts.append(text[: draw.randrange(20, len(text))])
    return prompts


@pytest.mark.parametrize("policy", slow_but(ONLINE, "lru", "arc", "s3fifo", "fifo"))
def test_output_is_exact_whatever_goes_first(start_engine, reference, policy):
    engine = start_engine(kv_blocks=30, kv=KVConfig(policy=policy))
    for _ in range(2):
        assert answers(engine, CROWD) == reference(CROWD, NUM_NEW)
    report = engine.hooks.report()
    assert report["faults"] == []
    assert report["preempted"] > 0 and report["evicted"]["prefix"] > 0


class NoTakeOver(Lru):
    """Fails when it is told of a block."""

    def on_insert(self, block):
        raise RuntimeError("no, thank you")


def test_policies_are_exchanged_while_requests_run(start_engine, tmp_path, reference):
    log = tmp_path / "events.jsonl"
    engine = start_engine(kv_blocks=30, host_kv_blocks=8, record=log, kv=KVConfig(policy="lru"))
    with ThreadPoolExecutor(1) as threads:
        for name in ("arc", "s3fifo", "gdsf"):
            answer = threads.submit(answers, engine, CROWD)
            wait_until(lambda: engine.hooks.kv.counts().active)
            engine.exchange_policy(name)
            assert answer.result(60) == reference(CROWD, NUM_NEW)
            assert answers(engine, CROWD) == reference(CROWD, NUM_NEW)  # wholly by the new one
    with pytest.raises(PolicyError, match="failed to take over: RuntimeError: no, thank you"):
        engine.exchange_policy(f"{__name__}:NoTakeOver")  # there are cached blocks to tell it of
    assert engine.exchange_policy("s3fifo", "cpu", small_ratio=0.2) == "lru"
    for options, message in (
        ({"policy": "no-such"}, "no-such"), ({"policy": "lru", "tier": "nvme"}, "no tier nvme here; the tiers are gpu, cpu"),
        ({"policy": "lru", "tier": "tape"}, "tier 'tape': allowed are"), ({"policy": "arc", "size": 3}, "size"),
    ):  # fmt: skip
        with pytest.raises(PolicyError, match=message):
            engine.exchange_policy(**options)
    assert answers(engine, CROWD) == reference(CROWD, NUM_NEW)
    report = engine.hooks.report()
    engine.close()
    assert report["faults"] == [] and report["evicted"]["prefix"] > 0
    assert [plugin["events"]["policies_exchanged"] for plugin in report["plugins"].values()] == [4]
    found = verify_log(log)
    assert found.agrees and found.counts["kv_exchanged"] == 4
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    exchanged = [(line["former"], line["policy"]) for line in lines if line["event"] == "kv_exchanged"]
    assert exchanged == [("lru", "arc"), ("arc", "s3fifo"), ("s3fifo", "gdsf"), ("lru", "s3fifo")]
    # The policy that decides is the new one: evictions carry its name.
    assert {"arc", "s3fifo", "gdsf"} <= {line["reason"] for line in lines if line["event"] == "evict"}


def test_an_engine_without_policies(start_engine):
    with pytest.raises(PluginError, match="no plug-in of this engine has eviction policies"):
        start_engine().exchange_policy("arc")


@pytest.mark.parametrize("policy", slow_but(["lru", "s3fifo", "arc"], "lru"))
def test_a_replay_decides_the_same(start_engine, tmp_path, policy):
    log = tmp_path / "events.jsonl"
    engine = start_engine(kv_blocks=30, record=log, kv=KVConfig(policy=policy))
    lengths = random.Random(7)
    params = [SamplingParams(lengths.randrange(1, 24), ignore_eos=True) for _ in range(NUM_REQUESTS)]
    engine.generate(shared_prompts(1, NUM_REQUESTS), params)
    report = engine.hooks.report()
    engine.close()
    assert report["faults"] == [] and report["preempted"] > 0
    found = verify_log(log)
    assert found.agrees and found.num_decisions > NUM_REQUESTS / 10
    assert found.num_hits >= report["prefix"]["hit_blocks"] + report["prefix_retries"]["hit_blocks"] > 0
    # The engine's own prefix index is the judge of what the books found.
    assert [plugin["plugin"]["lookups_disagreed"] for plugin in report["plugins"].values()] == [0]
