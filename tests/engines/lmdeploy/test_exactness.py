"""Greedy float32 output equals transformers token for token, whatever the cache and the scheduler do meanwhile."""

import asyncio
import random

import pytest

from sagellm.core.errors import EngineError
from sagellm.engines.base import SamplingParams
from tests.engines.lmdeploy.guesses import answer, greedy
from tests.pool import check_pool, settle
from tests.reference import make_prompts
from tests.sweeps import slow_but

NUM_NEW = 40
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
# Together they want far more than 30 blocks of 16 tokens.
CROWD = make_prompts((40, 100, 33, 90, 64, 70, 20, 50, 130, 12))


async def cancelled(engine, prompt, start_s=0.0, after_s=0.0, after_tokens=0):
    """Return the tokens of a request that is cancelled `after_s` after its start and after `after_tokens` tokens.

    LMDeploy's answer to a cancellation may be lost behind that of a step, so its stream cannot be read to the end.
    """
    from lmdeploy.messages import GenerationConfig
    from lmdeploy.pytorch.engine.request import RequestType
    from lmdeploy.pytorch.messages import SamplingParam

    await asyncio.sleep(start_s)
    session, instance = next(engine._sessions), engine.engine.create_instance()
    settings = SamplingParam.from_gen_config(GenerationConfig(max_new_tokens=NUM_NEW, top_k=1, ignore_eos=True))
    request = dict(session_id=session, token_ids=prompt, sampling_param=settings, adapter_name=None)
    instance.req_sender.send_async(RequestType.ADD_SESSION, dict(session_id=session, response=False))
    answer = instance.req_sender.send_async(RequestType.ADD_MESSAGE, request)
    await asyncio.sleep(after_s)
    while after_tokens and (answer.data is None or len(answer.data["token_ids"]) < after_tokens):
        await instance.req_sender.async_recv(answer)
    await instance.async_cancel(session)
    tokens = tuple(answer.data["token_ids"].tolist()) if answer.data else ()
    await instance.async_end(session)
    return tokens


def answers(engine, prompts, params=GREEDY):
    result = [generation.token_ids for generation in engine.generate(prompts, params)]
    settle(engine)
    return result


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen2-window", "mistral"])
@pytest.mark.parametrize("prefix_caching", slow_but([True, False], True))
def test_batches_equal_transformers(start_engine, reference, model, prefix_caching):
    prompts = make_prompts((5, 40, 100, 33))
    engine = start_engine(model=model, prefix_caching=prefix_caching)
    expected = reference(prompts, NUM_NEW, model)
    assert answers(engine, prompts[1:2]) == expected[1:2]
    assert answers(engine, prompts) == expected
    before = engine.hooks.report()["prefix"]["hit_tokens"]
    assert answers(engine, prompts) == expected
    hit = engine.hooks.report()["prefix"]["hit_tokens"] - before
    # All full blocks but those of a last token that must be computed: 2, 6 and 2 of 16 tokens.
    assert hit == (160 if prefix_caching else 0)


def test_under_block_pressure(start_engine, reference):
    engine = start_engine(kv_blocks=30)
    for _ in range(2):
        assert answers(engine, CROWD) == reference(CROWD, NUM_NEW)
    report = engine.hooks.report()
    # Without these the test proves nothing.
    assert report["preempted"] > 0
    assert report["evicted"]["prefix"] > 0 and report["evicted"]["recompute"] > 0
    assert report["prefix"]["query_tokens"] == 2 * sum(map(len, CROWD))
    assert report["prefix"]["query_blocks"] == 2 * sum(len(prompt) // 16 for prompt in CROWD)
    assert report["prefix_retries"]["query_tokens"] > 0, "who lost its blocks looks them up again"
    assert report["faults"] == []
    for _ in range(2):
        assert answers(engine, CROWD[:1]) == reference(CROWD[:1], NUM_NEW)
    assert engine.hooks.report()["prefix"]["hit_tokens"] > 0


@pytest.mark.slow
def test_under_block_pressure_with_a_window(start_engine, reference):
    engine = start_engine(model="mistral", kv_blocks=30)
    assert answers(engine, CROWD) == reference(CROWD, NUM_NEW, "mistral")
    assert engine.hooks.report()["preempted"] > 0


@pytest.mark.parametrize("decode_round", [4, 16])
def test_rounds_of_several_decode_steps(start_engine, reference, decode_round):
    engine = start_engine(kv_blocks=30, decode_round=decode_round)
    assert answers(engine, CROWD) == reference(CROWD, NUM_NEW)
    assert answers(engine, CROWD) == reference(CROWD, NUM_NEW)


@pytest.mark.slow
@pytest.mark.parametrize("decode_round", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_equal_prompts_under_pressure(start_engine, reference, decode_round):
    """A request that is sent back with its blocks finds the next one published by its twin."""
    (text,) = make_prompts((130,))
    engine = start_engine(kv_blocks=18, decode_round=decode_round)
    draw = random.Random(decode_round)
    for _ in range(16):  # each batch meets the case about one time in five
        prompts = [text[: draw.choice((33, 40, 47, 64, 70, 100))] for _ in range(8)]
        delays = [0.2 * draw.random() for _ in prompts]
        found = [generation.token_ids for generation in engine.generate(prompts, GREEDY, delays)]
        settle(engine)
        assert found == reference(prompts, NUM_NEW)
        check_pool(engine)
    report = engine.hooks.report()
    assert report["preempted"] + report["evicted"]["prefix"] > 0


@pytest.mark.parametrize("decode_round", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_shared_prefixes_under_pressure_with_cancellations(start_engine, reference, decode_round):
    """Requests share systems and documents, the pool holds a part of them, and a third is cancelled somewhere."""
    texts = make_prompts((48, 48, 33), seed=3)
    documents = make_prompts((20, 47, 16), seed=4)
    every = [text + document[:length] for text in texts for document in documents for length in (1, 16, 40)]
    engine = start_engine(kv_blocks=22, decode_round=decode_round)
    draw = random.Random(decode_round)

    async def one(prompt):
        start_s = 0.03 * draw.random()
        if draw.random() < 0.3:
            return await cancelled(engine, prompt, start_s, after_s=0.02 * draw.random())
        return (await engine._one(prompt, GREEDY, start_s, 0)).token_ids

    async def together(prompts):
        return await asyncio.gather(*[one(prompt) for prompt in prompts])

    num_whole = num_broken_off = 0
    for _ in range(8):
        prompts = [draw.choice(every) for _ in range(8)]
        found = engine._on_loop(together(prompts))
        settle(engine)
        for tokens, wanted in zip(found, reference(prompts, NUM_NEW), strict=True):
            assert tokens == wanted[: len(tokens)]
        num_whole += sum(len(tokens) == NUM_NEW for tokens in found)
        num_broken_off += sum(len(tokens) < NUM_NEW for tokens in found)
        check_pool(engine)
    report = engine.hooks.report()
    assert num_whole and num_broken_off and report["faults"] == []
    assert report["preempted"] and report["evicted"]["prefix"] and report["prefix"]["hit_tokens"]


def test_the_longest_answer_fits_whatever_the_round(start_engine, reference):
    """Room for a whole round is set aside at once, also at the very end of the pool."""
    engine = start_engine(kv_blocks=16, block_size=16, decode_round=16)
    (prompt,) = make_prompts((150,))
    (generation,) = engine.generate([prompt], SamplingParams(max_new_tokens=90, ignore_eos=True))
    assert generation.token_ids == reference([prompt], 90)[0]
    settle(engine)
    assert engine.hooks.report()["evicted"]["aborted"] == 0


def test_prompt_longer_than_a_prefill_step(start_engine, reference):
    prompts = make_prompts((300, 20, 150))
    engine = start_engine(max_prefill_tokens=64)
    expected = reference(prompts, NUM_NEW)
    assert answers(engine, prompts[:1]) == expected[:1]
    assert answers(engine, prompts) == expected
    assert engine.hooks.report()["prefix"]["hit_tokens"] >= 18 * 16


def test_shared_prefix_diverges_inside_a_block(start_engine, reference):
    base = make_prompts((50,))[0]
    prompts = [base, base[:40] + [11, 12], base[:32], base[:33], base + [9] * 30]
    engine = start_engine()
    expected = reference(prompts, NUM_NEW)
    for prompt, wanted in zip(prompts, expected, strict=True):
        assert answers(engine, [prompt]) == [wanted]
    assert answers(engine, prompts) == expected


def test_bfloat16_finishes(start_engine):
    engine = start_engine(model="llama-bf16", kv_blocks=30)
    assert engine.info.kv_schema.dtype == "bfloat16"
    for generation in engine.generate(CROWD, GREEDY):
        assert len(generation.token_ids) == NUM_NEW
        assert all(0 <= token < 320 for token in generation.token_ids)
        assert generation.finish_reason == "length"


def test_seeds_fix_the_output_whatever_the_batch(start_engine):
    engine = start_engine()
    prompts = make_prompts((20, 30, 40, 50))
    params = [SamplingParams(20, temperature=1.5, seed=seed, ignore_eos=True) for seed in (1, 2, 3, 2**31 + 5)]
    alone = [answers(engine, [prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)]
    assert answers(engine, prompts, params) == alone
    assert answers(engine, prompts[::-1], params[::-1]) == alone[::-1]
    same = [prompts[0]] * 3
    assert answers(engine, same, [params[0]] * 3) == [alone[0]] * 3
    others = answers(engine, same, [params[1], params[2], SamplingParams(20, temperature=1.5, ignore_eos=True)])
    assert len({alone[0], *others}) == 4
    free = SamplingParams(20, temperature=1.5, ignore_eos=True)
    assert len(set(answers(engine, same, free))) == 3


def test_stop_tokens_and_lengths(start_engine, reference):
    prompt = make_prompts((30,))[0]
    (expected,) = reference([prompt], NUM_NEW)
    stop = expected[7]
    first = expected.index(stop)
    engine = start_engine()
    (stopped, short, one) = engine.generate(
        [prompt] * 3, [SamplingParams(NUM_NEW, stop_token_ids=(stop,)), SamplingParams(5, ignore_eos=True),
                       SamplingParams(1, ignore_eos=True)],
    )  # fmt: skip
    assert (stopped.token_ids, stopped.finish_reason) == (expected[: first + 1], "stop")
    assert (short.token_ids, short.finish_reason) == (expected[:5], "length")
    assert one.token_ids == expected[:1]
    assert len(stopped.token_s) == first + 1
    assert list(stopped.token_s) == sorted(stopped.token_s)


def test_cancelling_returns_the_blocks_and_harms_nobody(start_engine, reference):
    prompts = make_prompts((60, 70, 80))
    engine = start_engine()

    async def all_three():
        first = cancelled(engine, prompts[0], after_tokens=3)
        second = cancelled(engine, prompts[1], after_tokens=10)
        return await asyncio.gather(first, second, engine._one(prompts[2], GREEDY, 0, 0))

    first, second, third = engine._on_loop(all_three())
    settle(engine)
    expected = reference(prompts, NUM_NEW)
    assert first == expected[0][: len(first)] and 3 <= len(first) < NUM_NEW
    assert second == expected[1][: len(second)] and 10 <= len(second) < NUM_NEW
    assert third.token_ids == expected[2]
    assert engine.hooks.kv.counts().active == 0
    assert answers(engine, prompts) == expected  # what the cancelled ones left in the prefix cache is right


def test_requests_that_cannot_fit_are_refused(start_engine, reference):
    engine = start_engine(kv_blocks=16, context_length=512)
    with pytest.raises(EngineError, match="INPUT_LENGTH_ERROR"):
        engine.generate(make_prompts((600,)), GREEDY)
    prompts = make_prompts((30,))
    assert answers(engine, prompts) == reference(prompts, NUM_NEW)


def test_a_response_that_is_not_yet_read_beside_log_probabilities(start_engine, reference):
    """A request without them gets empty ones in a step with one that has some, after a response without any."""
    prompts = make_prompts((20, 30), seed=8)
    engine = start_engine()

    async def both():
        session, instance = next(engine._sessions), engine.engine.create_instance()
        tokens, beside = [], None
        try:
            async for output in instance.async_stream_infer(session, prompts[0], gen_config=greedy(dict(max_new_tokens=200))):
                tokens += output.token_ids
                if beside is None:
                    await asyncio.sleep(0.05)  # responses come meanwhile
                    beside = await answer(engine, prompts[1], greedy(dict(max_new_tokens=8, logprobs=2)))
        finally:
            await instance.async_end(session)
        return tuple(tokens), beside

    tokens, (others, logprobs) = engine._on_loop(both())
    assert [tokens, others] == [tuple(reference(prompts[:1], 200)[0]), tuple(reference(prompts[1:], 8)[0])]
    assert len(logprobs) == 8 and all(len(each) >= 2 for each in logprobs)
