"""Tests of the service that requests ask for. Plug-ins of a running engine see it; a service that cannot be met is refused."""

import json
import math
import time

import pytest

from sagellm.core.config import PluginSpec
from sagellm.core.errors import EngineError
from sagellm.core.hooks import Phase, Plugin, ServiceLevel
from sagellm.core.service import ServiceRequest
from sagellm.engines.base import SamplingParams
from sagellm.replay.schedule.decisions import read_decisions
from tests.engines.lmdeploy.test_exactness import answers
from tests.pool import settle
from tests.reference import make_prompts

PROMPT = list(range(5, 55))
PROMPTS = make_prompts((20, 30, 10))
URGENT = ServiceRequest(priority=-3, tenant="team.a", deadline=int(time.time()) + 3600, ttft_slo_ms=250, tpot_slo_ms=40.5)


class Sees(Plugin):
    def __init__(self) -> None:
        self.views, self.matches = [], []

    def admit(self, request):
        self.views.append(request)
        return True

    def schedule(self, view):
        self.views.extend(view.requests)
        assert view.now_s <= time.perf_counter() and view.max_batch_size == 8

    def on_prefix_matched(self, match):
        self.matches.append(match.tenant_id)


SEES = PluginSpec(name="tests.engines.lmdeploy.test_service:Sees")


def generate(engine, *services: ServiceRequest | None, max_new_tokens: int = 5, prompt: list[int] = PROMPT) -> None:
    """A request for each of them, in one session."""
    from lmdeploy.messages import GenerationConfig

    async def one():
        instance = engine.engine.create_instance()
        session = next(engine._sessions)
        for service in services:
            config = GenerationConfig(max_new_tokens=max_new_tokens, ignore_eos=True, top_k=1)
            if service is not None:
                config.sage = service.model_dump_json(exclude_defaults=True)
            async for _ in instance.async_stream_infer(session, prompt, gen_config=config):
                pass
        await instance.async_end(session)

    engine._on_loop(one())
    settle(engine)


def test_a_request_that_asks_for_nothing(start_engine):
    engine = start_engine(SEES)
    generate(engine, None)
    seen = engine.hooks._host.plugins[0][1].views
    assert {row.service for row in seen} == {ServiceLevel()} and {row.max_new_tokens for row in seen} == {5}


def test_the_model_or_adapter_that_a_request_names_is_seen_and_told_apart(start_engine):
    """Without adapters the weights are the same, but blocks of the prefix cache are kept apart."""
    engine = start_engine(SEES, kv={"policy": "lru"})
    params = [SamplingParams(5, ignore_eos=True, adapter=name) for name in (None, "a", "b")]
    found = [engine.generate([PROMPT], each)[0].token_ids for each in params]
    assert found[0] == found[1] == found[2]
    assert {row.adapter for row in engine.hooks._host.plugins[0][1].views} == {"", "a", "b"}
    assert engine.hooks.report()["prefix"]["hit_tokens"] == 0


def test_steps_wait_for_a_model_that_is_not_loaded(start_engine, monkeypatch):
    """The baseline of `benchmarks.schedules`: a device with room for one model."""
    from benchmarks.scheduling import engine as contestant

    slept = []
    monkeypatch.setattr(contestant.time, "sleep", slept.append)
    engine = start_engine()
    contestant.switching(engine.engine, 0.5)
    for name in ("a", "a", "b"):
        engine.generate([PROMPT], SamplingParams(3, ignore_eos=True, adapter=name))
    assert [seconds for seconds in slept if seconds == 0.5] == [0.5, 0.5], "a, then b; a second time a is there"


def test_what_it_asks_for_is_seen_everywhere(start_engine, tmp_path):
    record = tmp_path / "events.jsonl"
    engine = start_engine(SEES, record=record)
    due = time.time() + 100
    generate(engine, ServiceRequest(priority=-5, tenant="acme", deadline=due, ttft_slo_ms=250, tpot_slo_ms=40))
    plugin = engine.hooks._host.plugins[0][1]
    (service,) = {row.service for row in plugin.views}
    assert service[:2] == (-5, "acme") and service[3:] == (0.25, 0.04)
    assert abs(service.deadline_s - time.perf_counter() - (due - time.time())) < 1
    assert plugin.matches == ["acme"]
    engine.close()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    (arrive,) = [line for line in lines if line["event"] == "arrive"]
    asked = arrive["service"]
    assert arrive["tenant"] == "acme" and 90 < asked.pop("deadline_s") <= 100
    assert asked == {"priority": -5, "ttft_s": 0.25, "tpot_s": 0.04} and isinstance(asked["priority"], int)


def test_each_request_of_a_session_has_its_own(start_engine, tmp_path):
    record = tmp_path / "events.jsonl"
    engine = start_engine(SEES, record=record)
    generate(engine, ServiceRequest(priority=-5, tenant="acme"), ServiceRequest(priority=3, tenant="other"), None)
    plugin = engine.hooks._host.plugins[0][1]
    levels = [ServiceLevel(-5, "acme"), ServiceLevel(3, "other"), ServiceLevel()]
    assert list(dict.fromkeys(row.service for row in plugin.views)) == levels
    engine.close()
    # All of it was left to the engine, and is on record all the same.
    lines = read_decisions(record)
    assert list(dict.fromkeys(row.service for line in lines for row in line.view.requests)) == levels
    assert all(line.decision is None and line.phase is line.view.phase for line in lines)


def test_when_tokens_came_is_seen(start_engine):
    engine = start_engine(SEES, decode_round=1)
    generate(engine, None, max_new_tokens=200)  # a step that is left to the engine is not asked about for a moment
    rows = engine.hooks._host.plugins[0][1].views
    waiting = [row for row in rows if row.phase is Phase.PREFILL]
    running = [row for row in rows if row.phase is Phase.DECODE]
    assert waiting and all(row.first_token_s == row.last_token_s == math.inf for row in waiting)
    assert len(running) > 2 and len({row.first_token_s for row in running}) == 1
    last = [row.last_token_s for row in running]
    assert last == sorted(last) and last[0] >= running[0].first_token_s > running[0].arrival_s and last[-1] > last[0]


def test_a_level_that_nobody_can_read_is_passed_over(start_engine):
    engine = start_engine(SEES)

    class Broken:
        def model_dump_json(self, **_):
            return '{"priority": "high"}'

    generate(engine, Broken())
    assert {row.service for row in engine.hooks._host.plugins[0][1].views} == {ServiceLevel()}


def test_it_comes_to_the_engine_with_its_request(start_engine, reference, monkeypatch):
    from lmdeploy.pytorch.messages import SamplingParam

    build, seen = SamplingParam.from_gen_config, []

    def noting(gen_config):
        seen.append(getattr(gen_config, "sage", None))
        return build(gen_config)

    monkeypatch.setattr(SamplingParam, "from_gen_config", noting)
    params = [SamplingParams(8, ignore_eos=True, service=service) for service in (URGENT, None, ServiceRequest())]
    assert answers(start_engine(), PROMPTS, params) == reference(PROMPTS, 8)
    assert seen[1:] == [None, None]
    assert ServiceRequest.model_validate_json(seen[0]) == URGENT


def test_a_deadline_that_has_passed_is_refused_before_anything_runs(start_engine, reference):
    engine = start_engine()
    late = SamplingParams(8, ignore_eos=True, service=ServiceRequest(deadline=1.5))
    with pytest.raises(EngineError, match=r"deadline of prompt 1, 1\.5, has passed: it is Unix time in seconds"):
        engine.generate(PROMPTS, [SamplingParams(8, ignore_eos=True), late, late])
    assert answers(engine, PROMPTS, SamplingParams(8, ignore_eos=True)) == reference(PROMPTS, 8)
