"""Blocks that a plug-in gives up of its own accord: gone at once, nothing else with them, and their room is of use at once."""

import json
import random

import numpy as np
import pytest

from sagellm.core.errors import PluginError
from sagellm.core.hooks import MigrationPlan, Plugin, Tier
from sagellm.engines.base import SamplingParams
from tests.engines.lmdeploy.test_exactness import CROWD, NUM_NEW, answers
from tests.engines.lmdeploy.test_host_blocks import at_admission, flat
from tests.engines.lmdeploy.test_migration import AT_ADMISSION, LONG, SHORT, block_bytes
from tests.plugins import plugin_of
from tests.pool import check_pool
from tests.reference import make_prompts

SECOND = make_prompts((100,), seed=31)[0]
LISTENER = "tests.plugins:Listener"
FEW = SamplingParams(max_new_tokens=4, ignore_eos=True)  # fill no further block: the six of the prompt are all there are


def path_of(engine, prompt):
    return engine.hooks.cache.path(np.array(prompt), "").tolist()


def move(handle, src, dst, blocks):
    assert handle.migrate_blocks(MigrationPlan(src, dst, tuple(blocks))).moved == tuple(blocks)


def test_what_is_dropped_is_gone_and_others_hear_of_it(start_engine, reference, tmp_path):
    log = tmp_path / "log.jsonl"
    engine = start_engine("tests.engines.lmdeploy.test_drop_blocks:HearsItself", LISTENER, kv_blocks=32, record=log)
    answers(engine, [LONG], FEW)
    path = path_of(engine, LONG)

    def job(handle):
        free = handle.block_counts().free
        assert handle.is_recording
        with pytest.raises(PluginError, match="1 reasons for 2 blocks"):
            handle.drop_blocks(path[-2:], ["old"])
        assert handle.drop_blocks(path[:3]) == (), "others continue them"
        assert handle.drop_blocks([path[1], path[-1], -1, 1000]) == (path[-1],), "one of them is a leaf"
        assert sorted(handle.drop_blocks(path[3:5], ["old", "older"])) == sorted(path[3:5])
        assert handle.block_counts().free == free + 3
        assert not {info.block_id for info in handle.get_block_info()} & set(path[3:])
        return free

    at_admission(engine, job)
    check_pool(engine)
    assert plugin_of(engine).evicted == [], "who asked for it knows"
    listener = plugin_of(engine, 1)
    assert sorted(block for notice in listener.evicted for block in notice.block_ids) == sorted(path[3:])
    assert listener.by_callback == listener.evicted
    hit = engine.hooks.report()["prefix"]["hit_tokens"]
    assert answers(engine, [LONG], SHORT) == reference([LONG], 16)
    assert engine.hooks.report()["prefix"]["hit_tokens"] - hit == 48
    engine.close()
    lines = [line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "evict"]
    reasons = {block: why for line in lines for block, why in zip(line["victims"], line.get("reasons", ()), strict=False)}
    assert {line["policy"] for line in lines} == {"tests.engines.lmdeploy.test_drop_blocks:HearsItself"}
    assert reasons == {path[3]: "old", path[4]: "older"}


def test_what_continues_it_on_another_tier_goes_too(start_engine):
    engine = start_engine(AT_ADMISSION, kv_blocks=32, host_kv_blocks=16)
    answers(engine, [LONG], FEW)
    path = path_of(engine, LONG)

    def job(handle):
        move(handle, Tier.GPU, Tier.CPU, path[4:])
        assert handle.block_counts().host_used == len(path) - 4
        assert sorted(handle.drop_blocks(path[2:4])) == sorted(path[2:])
        assert handle.block_counts().host_used == 0

    at_admission(engine, job)
    check_pool(engine)
    assert path_of(engine, LONG) == path[:2]


def test_its_room_on_the_host_is_of_use_in_the_same_hook(start_engine, reference):
    engine = start_engine(AT_ADMISSION, kv_blocks=32, host_kv_blocks=6)
    for prompt in (LONG, SECOND):
        answers(engine, [prompt], FEW)
    path, other = path_of(engine, LONG)[:6], path_of(engine, SECOND)[:6]
    before = block_bytes(engine, other)

    def job(handle):
        move(handle, Tier.GPU, Tier.CPU, path)
        assert handle.migrate_blocks(MigrationPlan(Tier.GPU, Tier.CPU, tuple(other))).moved == ()
        assert sorted(handle.drop_blocks(path)) == sorted(path)
        move(handle, Tier.GPU, Tier.CPU, other)

    at_admission(engine, job)
    check_pool(engine)
    for block, tensors in block_bytes(engine, other).items():
        assert np.array_equal(flat(tensors), flat(before[block]))
    hit = engine.hooks.report()["prefix"]["hit_tokens"]
    assert answers(engine, [SECOND, LONG], SHORT) == reference([SECOND, LONG], 16)
    assert engine.hooks.report()["prefix"]["hit_tokens"] - hit == 96


@pytest.mark.parametrize("host", [0, 12])
def test_anything_dropped_at_any_time(start_engine, reference, host):
    engine = start_engine("tests.engines.lmdeploy.test_drop_blocks:DropsAnything", kv_blocks=40, host_kv_blocks=host)
    for _ in range(2):
        assert answers(engine, CROWD) == reference(CROWD, NUM_NEW)
        check_pool(engine)
    assert engine.hooks.report()["faults"] == [], engine.hooks._host.faults
    assert plugin_of(engine).num_dropped > 20


class HearsItself(Plugin):
    def attach(self, engine):
        self.engine, self.jobs, self.evicted = engine, [], []

    def admit(self, request):
        return self.jobs.pop(0)(self.engine) is not False if self.jobs else True

    def on_evicted(self, notice):
        self.evicted.append(notice)


class DropsAnything(Plugin):
    """Drops and offloads blocks of every kind in every hook that may use the handle."""

    def attach(self, engine):
        self.engine, self.draw, self.num_dropped = engine, random.Random(1), 0

    def drop(self):
        blocks = [info.block_id for info in self.engine.get_block_info()]
        plan = MigrationPlan(Tier.GPU, Tier.CPU, tuple(self.draw.sample(blocks, len(blocks) // 4)))
        self.engine.migrate_blocks(plan)
        asked = [*self.draw.sample(blocks, len(blocks) // 3), self.draw.randrange(-2, 50)]
        dropped = self.engine.drop_blocks(asked)
        assert not set(dropped) & {info.block_id for info in self.engine.get_block_info()}
        self.num_dropped += len(dropped)

    def admit(self, request):
        self.drop()
        return True

    def select_victims(self, request):
        self.drop()
        return request.leaf_first()[: request.count]

    def on_evicted(self, notice):
        self.drop()

    def on_request_end(self, request_id):
        self.drop()

    def on_step_end(self, result):
        self.drop()
