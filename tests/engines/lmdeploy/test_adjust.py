"""Penalties and logit bias in the real engine, against the plain formula on transformers' scores."""

import asyncio

import pytest
import torch
from lmdeploy.messages import GenerationConfig
from transformers import AutoModelForCausalLM

from sagellm.core.running import PaddedPrompt
from sagellm.engines.lmdeploy.adjust import ScoreChanges

PROMPTS = [[7, 7, 7, 30, 41, 52], list(range(20, 60)), [0, 0, 61, 62], [90]]
CHANGES = [(1.0, 0.5, {}), (0.0, 2.0, {}), (2.0, 0.0, {33: 4.0}), (-1.5, -0.5, {12: -100.0, 13: 3.5})]
NUM_NEW = 24


@pytest.fixture(scope="module")
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder("llama"))


def expected(model, prompt, presence, frequency, bias):
    answer = []
    while len(answer) < NUM_NEW:
        with torch.no_grad():
            scores = model(torch.tensor([[*prompt, *answer]])).logits[0, -1]
        for token in set(answer):
            scores[token] -= presence + frequency * answer.count(token)
        for token, value in bias.items():
            scores[token] += value
        answer.append(int(scores.argmax()))
    return answer


def generate(engine, changes):
    async def one(prompt, change, delay_s):
        await asyncio.sleep(delay_s)
        processors = [change] if change else None
        config = GenerationConfig(max_new_tokens=NUM_NEW, ignore_eos=True, top_k=1, logits_processors=processors)
        instance, session, tokens = engine.engine.create_instance(), next(engine._sessions), []
        async for output in instance.async_stream_infer(session, prompt, gen_config=config):
            tokens.extend(output.token_ids)
        await instance.async_end(session)
        return tokens

    async def every():
        return await asyncio.gather(*(one(*row, 0.01 * place) for place, row in enumerate(zip(PROMPTS, changes, strict=True))))

    return engine._on_loop(every())


@pytest.mark.parametrize("options", [{}, {"decode_round": 8}, {"kv_blocks": 16}, {"speculative": "ngram"}])
def test_answers_follow_the_formula_in_a_batch(start_engine, model, options):
    engine = start_engine(**options)
    changes = [ScoreChanges(*change, PaddedPrompt.of(prompt)) for change, prompt in zip(CHANGES, PROMPTS, strict=True)]
    found = generate(engine, changes)
    assert found == [expected(model, prompt, *change) for prompt, change in zip(PROMPTS, CHANGES, strict=True)]
    plain = generate(engine, [None] * len(PROMPTS))
    assert sum(one != other for one, other in zip(found, plain, strict=True)) >= 3, "the changes show"


@pytest.mark.parametrize("prompt", [*PROMPTS, [5, 5, 5]])
@pytest.mark.parametrize("padding", [[], [0] * 3, [7] * 2, [5], [30] * 4])
def test_padding_is_told_from_the_prompt(prompt, padding):
    answer = [8, 9, 8]
    scores = ScoreChanges(1.0, 0.0, {}, PaddedPrompt.of(prompt))(torch.tensor([*padding, *prompt, *answer]), torch.zeros(100))
    assert {token for token in range(100) if scores[token]} == set(answer)
