"""A prefix index of one's own in front of LMDeploy's, and the notices of what was found and stored."""

import numpy as np
from lmdeploy.messages import GenerationConfig

from sagellm.engines.base import SamplingParams
from tests.engines.lmdeploy.test_exactness import CROWD, answers
from tests.plugins import plugin_of
from tests.pool import settle
from tests.reference import make_prompts

OWN_INDEX = "tests.plugins:OwnIndex"
SHORT = SamplingParams(max_new_tokens=20, ignore_eos=True)
PROMPTS = make_prompts((64, 65, 100, 15, 17))


def test_an_own_index_finds_what_the_engine_finds(start_engine, reference):
    own, plain = start_engine(OWN_INDEX), start_engine()
    expected = reference(PROMPTS, 20)
    for _ in range(2):
        assert answers(own, PROMPTS, SHORT) == expected
        assert answers(plain, PROMPTS, SHORT) == expected
    hits = plain.hooks.report()["prefix"]
    assert own.hooks.report()["prefix"] == hits
    assert hits["hit_tokens"] == 48 + 64 + 96 + 0 + 16
    second = plugin_of(own).matched[len(PROMPTS) :]
    assert [match.num_matched for match in second] == [48, 64, 96, 0, 16]
    assert [match.num_tokens for match in second] == [64, 65, 100, 15, 17]
    assert {match.source for match in second} == {OWN_INDEX}
    assert all(len(match.block_ids) * 16 == match.num_matched for match in second)


def test_an_own_index_under_pressure(start_engine, reference):
    engine = start_engine(OWN_INDEX, kv_blocks=30)
    for _ in range(2):
        assert answers(engine, CROWD) == reference(CROWD, 40)
    assert answers(engine, CROWD[:1]) == answers(engine, CROWD[:1]) == reference(CROWD[:1], 40)
    report = engine.hooks.report()
    assert report["faults"] == []
    assert report["preempted"] > 0 and report["evicted"]["prefix"] > 0
    assert report["prefix"]["hit_tokens"] > 0


def test_what_was_stored_is_what_was_computed(start_engine, reference):
    engine = start_engine("tests.plugins:Listener")
    for prompt, wanted in zip(PROMPTS, reference(PROMPTS, 20), strict=True):
        engine.generate([prompt], SHORT)
        settle(engine)
        listener = plugin_of(engine)
        mine = [u for u in listener.stored if u.request_id == listener.ended[-1]]
        whole = prompt + list(wanted)
        position = 0
        for update in mine:
            assert update.first_token == position and update.namespace == ""
            assert len(update.token_ids) == 16 * len(update.block_ids)
            position += len(update.token_ids)
            assert update.token_ids.tolist() == whole[update.first_token : position]
            assert not update.token_ids.flags.writeable
            found = engine.hooks.cache.path(np.array(whole[:position]), "")
            assert found[-len(update.block_ids) :].tolist() == list(update.block_ids)
        assert position == (len(prompt) + 19) // 16 * 16


def test_a_second_request_stores_only_what_is_new(start_engine):
    engine = start_engine("tests.plugins:Listener")
    prompt = PROMPTS[2]
    engine.generate([prompt], SHORT)
    engine.generate([prompt[:70] + [5] * 30], SHORT)
    settle(engine)
    listener = plugin_of(engine)
    first, second = listener.ended
    assert [match.num_matched for match in listener.matched] == [0, 64]
    shared = next(match.block_ids for match in listener.matched if match.request_id == second)
    stored = [block for u in listener.stored if u.request_id == first for block in u.block_ids]
    assert list(shared) == stored[:4]
    assert min(u.first_token for u in listener.stored if u.request_id == second) == 64


def test_a_request_of_one_token_leaves_its_prompt_behind(start_engine, reference):
    engine = start_engine()
    for hit in (0, 96):
        assert answers(engine, [PROMPTS[2]], SamplingParams(1, ignore_eos=True)) == reference([PROMPTS[2]], 1)
        assert engine.hooks.report()["prefix"]["hit_tokens"] == hit
    assert answers(engine, [PROMPTS[2]], SHORT) == reference([PROMPTS[2]], 20)


def test_requests_of_different_adapters_share_nothing(start_engine):
    engine, hits = start_engine(), []

    async def run(session, adapter):
        instance = engine.engine.create_instance()
        config = GenerationConfig(max_new_tokens=4, top_k=1, ignore_eos=True)
        async for _ in instance.async_stream_infer(session, PROMPTS[1], gen_config=config, adapter_name=adapter):
            pass
        await instance.async_end(session)

    for session, adapter in enumerate(("a", "b", None, "b", "a")):
        engine._on_loop(run(session, adapter))
        settle(engine)
        hits.append(engine.hooks.report()["prefix"]["hit_tokens"])
    assert hits == [0, 0, 0, 64, 128]


def test_prefix_caching_off_leaves_the_hooks_silent(start_engine):
    engine = start_engine(OWN_INDEX, prefix_caching=False)
    engine.generate(PROMPTS, SHORT)
    assert [hook for _, hook, _ in engine.hooks.report()["calls"]] == ["attach"]
    assert engine.hooks.report()["prefix_index"] == {}
    assert engine.hooks.report()["prefix"] == dict.fromkeys(("query_tokens", "hit_tokens", "query_blocks", "hit_blocks"), 0)
