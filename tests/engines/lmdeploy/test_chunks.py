"""Prompts that are computed in parts, with other requests' steps between them: same tokens, nothing lost."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from sagellm.core.config import PluginSpec
from sagellm.core.hooks import Phase, Plugin, ScheduleDecision
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.chunks import Chunks
from tests.pool import settle

NEW = 12
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
RANDOM = np.random.default_rng(5)
LONG = RANDOM.integers(3, 300, 150).tolist()
SHORT = [RANDOM.integers(3, 300, size).tolist() for size in (20, 33, 9)]
CHUNKED = "tests.engines.lmdeploy.test_chunks:Chunked"


class Chunked(Plugin):
    """At most so many prompt tokens of each request a step, and a decode step after each of them.

    `hold_until`: requests after number 0 are held until so many of its tokens are computed.
    """

    def __init__(self, tokens: int = 32, phase: str = "", hold_until: int = 0) -> None:
        self.tokens, self.phase, self.hold_until = tokens, phase, hold_until
        self.views, self.steps = [], []

    def schedule(self, view):
        self.views.append(view)
        chunks = {request.request_id: self.tokens for request in view.waiting}
        last = self.steps[-1].phase if self.steps else None
        phase = Phase.DECODE if last is Phase.PREFILL and (view.running or view.num_in_flight) else None
        hold = frozenset()
        if sum(tokens for _, tokens in of_request(self.steps, 0)) < self.hold_until:
            hold = frozenset(each.request_id for each in view.waiting if each.request_id)
        return ScheduleDecision(hold=hold, chunk_tokens=chunks, phase=Phase(self.phase) if self.phase else phase)

    def on_step_end(self, result):
        self.steps.append(result)


def chunked(**options) -> PluginSpec:
    return PluginSpec(name=CHUNKED, options=options)


def plugin_of(engine, place=0):
    return engine.hooks._host.plugins[place][1]


def answers(engine, prompts, delays_s=None, params=PARAMS):
    return [found.token_ids for found in engine.generate(prompts, params, delays_s)]


def of_request(steps, request):
    """(phase, tokens) of each step that the request was in."""
    return [(step.phase, tokens) for step in steps for each, tokens in step.computed if each == request]


@pytest.mark.parametrize("tokens", [1, 15, 16, 32, 100, 149, 150, 1000])
@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_in_parts_gives_the_same_tokens(start_engine, reference, tokens, caching):
    engine = start_engine(chunked(tokens=tokens), prefix_caching=caching, plugin_time_limit_s=10.0)  # a busy machine stalls
    assert answers(engine, [LONG]) == reference([LONG], NEW)
    settle(engine)
    parts = [count for phase, count in of_request(plugin_of(engine).steps, 0) if phase is Phase.PREFILL]
    whole, rest = divmod(len(LONG), tokens)
    assert parts == [tokens] * whole + [rest] * (rest > 0)
    assert engine.hooks.report()["chunks"] == len(parts) - 1


@pytest.mark.parametrize("model", ["llama", "qwen2-window"])
def test_others_decode_between_the_parts(start_engine, reference, model):
    engine = start_engine(chunked(tokens=16), model=model, decode_round=1)
    prompts = [*SHORT, LONG]
    long_params = [SamplingParams(max_new_tokens=200, ignore_eos=True)] * len(SHORT) + [PARAMS]
    found = answers(engine, prompts, [0, 0, 0, 0.05], long_params)
    assert found[:-1] == reference(SHORT, 200, model) and found[-1:] == reference([LONG], NEW, model)
    settle(engine)
    steps = plugin_of(engine).steps
    own = [number for number, step in enumerate(steps) if dict(step.computed).get(3) == 16 and step.phase is Phase.PREFILL]
    between = [steps[number].phase for number in range(own[0], own[-1])]
    assert len(own) >= 5
    assert between.count(Phase.DECODE) >= len(own) - 2, "the others waited for the whole prompt"


def test_a_part_is_cached_at_once(start_engine, reference):
    """A second request with the same prompt finds what the first has computed so far, and gives the same tokens."""
    engine = start_engine(chunked(tokens=16, hold_until=32), decode_round=1)
    same = [LONG, LONG[:100] + SHORT[0]]
    assert answers(engine, same) == reference(same, NEW)
    assert 32 <= engine.hooks.report()["prefix"]["hit_tokens"] < 96


def test_parts_under_pressure_lose_nothing(start_engine, reference):
    """A prompt that is computed in part loses its blocks to others now and then, and is computed again."""
    engine = start_engine(chunked(tokens=16), kv_blocks=30, max_batch_size=8, decode_round=1)
    prompts = [RANDOM.integers(3, 300, 60 + 7 * number).tolist() for number in range(8)]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    assert answers(engine, prompts, params=params) == reference(prompts, 40)
    assert engine.hooks.report()["preempted"] > 0


def test_only_the_first_of_a_step_is_cut(start_engine, reference):
    together = PluginSpec(name="tests.plugins:Together", options={"count": 3})
    engine = start_engine(together, chunked(tokens=15), prefix_caching=False)
    assert answers(engine, SHORT) == reference(SHORT, NEW)
    settle(engine)
    refused = [row for step in plugin_of(engine, 1).steps for row in step.refused]
    assert refused and all("not the first of its step" in why for _, why in refused)


def test_the_phase_is_the_plugins(start_engine, reference):
    """Decoding goes first: no request joins while another one decodes."""
    engine = start_engine(chunked(tokens=10_000, phase="decode"), decode_round=1)
    prompts = [SHORT[0], LONG]
    assert answers(engine, prompts, [0, 0.05]) == reference(prompts, NEW)
    settle(engine)
    phases = [step.phase for step in plugin_of(engine).steps]
    assert phases == [Phase.PREFILL, *[Phase.DECODE] * (NEW - 1)] * 2


def test_what_cannot_be_cut_is_said(start_engine):
    """Here a request that wants the scores of its whole prompt."""
    from lmdeploy.messages import GenerationConfig

    engine = start_engine(chunked(tokens=16), prefix_caching=False)

    async def scores():
        instance = engine.engine.create_instance()
        wanted = GenerationConfig(output_logits="all", max_new_tokens=0)
        found = [out.logits async for out in instance.async_stream_infer(7, LONG, gen_config=wanted)]
        await instance.async_end(7)
        return next(logits for logits in found if logits is not None)

    assert len(engine._on_loop(scores())) == len(LONG)
    settle(engine)
    (step,) = plugin_of(engine).steps
    assert step.computed == ((7, 150),) and "scores" in dict(step.refused)[7]


def test_a_cancelled_part_leaves_nothing(start_engine, reference):
    """Requests that are cancelled while a part of their prompt is on its way; the pool is checked afterwards."""
    engine = start_engine(chunked(tokens=8), decode_round=1)

    async def cancelled(session):
        instance = engine.engine.create_instance()
        stream = instance.async_stream_infer(session, list(LONG), gen_config=None)
        task = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0.004 * (session % 5))
        await instance.async_cancel(session)
        await instance.async_end(session)
        task.cancel()

    async def several():
        await asyncio.gather(*[cancelled(session) for session in range(100, 110)])

    engine._on_loop(several())
    assert answers(engine, [LONG]) == reference([LONG], NEW)


def test_a_cut_leaves_its_neighbours_alone(start_engine, reference):
    """One that wants the scores of its prompt, in the step of a prompt that is cut: they are split by tokens computed."""
    from lmdeploy.messages import GenerationConfig

    together = PluginSpec(name="tests.plugins:Together", options={"count": 2})
    engine = start_engine(together, chunked(tokens=100), prefix_caching=False)

    async def both():
        first = engine.engine.create_instance()
        cut = [out.token_ids async for out in first.async_stream_infer(0, LONG, gen_config=_greedy(NEW))]
        await first.async_end(0)
        return cut

    async def scores():
        await asyncio.sleep(0.001)
        instance = engine.engine.create_instance()
        wanted = GenerationConfig(output_logits="all", max_new_tokens=0)
        found = [out.logits async for out in instance.async_stream_infer(1, SHORT[0], gen_config=wanted)]
        await instance.async_end(1)
        return next(logits for logits in found if logits is not None)

    async def run():
        return await asyncio.gather(both(), scores())

    tokens, logits = engine._on_loop(run())
    assert tuple(token for part in tokens for token in part) == reference([LONG], NEW)[0]
    assert len(logits) == len(SHORT[0])


def test_who_ends_while_a_part_is_on_its_way_has_all_its_tokens_again():
    """The record of a request that ends counts on them, and a request that loses its blocks begins anew with all of them."""

    class SchedulerSequenceDefault:  # as LMDeploy's, as far as it is looked at
        seq_id = session_id = 3
        sampling_param = SimpleNamespace(response_format=None)
        return_logits = return_routed_experts = False
        history_multimodals, history_embeddings = SimpleNamespace(empty=lambda: True), ()
        _num_history_ids, _num_token_ids, status = 0, 210, "LOCKED"
        num_token_ids = property(lambda self: self._num_token_ids)

    cache = SimpleNamespace(window_size=-1)
    chunks, seq = Chunks(SimpleNamespace(is_ssm=False, cache_config=cache)), SchedulerSequenceDefault()
    chunks.cut(seq, 64, is_first=True)
    assert (seq._num_token_ids, chunks.num_cut) == (64, 1)
    chunks.forget(seq)
    assert (seq._num_history_ids, seq._num_token_ids) == (0, 210)
    chunks.send_back([seq])
    assert chunks.settle([seq]) == set() and (seq._num_history_ids, seq._num_token_ids) == (0, 210)
    chunks.cut(seq, 64, is_first=True)
    assert chunks.settle([seq]) == {3} and (seq._num_history_ids, seq._num_token_ids) == (64, 146)


def _greedy(new_tokens):
    from lmdeploy.messages import GenerationConfig

    return GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, top_k=1)
