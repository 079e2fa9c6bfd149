"""Guesses on a device whose decode steps take one token a sequence: a step with guesses goes as one of prompts whose beginnings
are in the cache. Tried on the CPU device, which is told to be such a one."""

import random

import pytest

from sagellm.core.errors import SpeculationError
from sagellm.engines.base import SamplingParams
from sagellm.engines.lmdeploy.cpu.device import CpuDevice
from sagellm.engines.lmdeploy.cpu.operators.attention import CpuAttentionMetadata
from tests.engines.lmdeploy.guesses import CROWD, KNOWING, NEW, ask, counts, tell, tokens_of
from tests.reference import make_prompts


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    """(tokens of each sequence, whether LMDeploy calls it a decode step) of every step, since the last `clear`."""
    monkeypatch.setattr(CpuDevice, "decodes_ragged", False)
    seen, of_step = [], CpuAttentionMetadata.of_step.__func__

    def noted(cls, context):
        counts = context.q_seqlens.tolist()
        seen.append((counts, context.is_decoding))
        assert not context.is_decoding or max(counts) == 1, "a decode step of this device has one token a sequence"
        return of_step(cls, context)

    monkeypatch.setattr(CpuAttentionMetadata, "of_step", classmethod(noted))
    return seen


def ragged(seen):
    """Steps in which sequences have several tokens, each another number."""
    return [counts for counts, _ in seen if len(set(counts)) > 1]


@pytest.mark.parametrize(("blocks", "decode_round"), [(30, 1), (30, 5), (200, 3)])
def test_greedy_equals_transformers(start_engine, reference, steps, blocks, decode_round):
    expected = reference(CROWD, NEW)
    tell(CROWD, expected)
    engine = start_engine(kv_blocks=blocks, decode_round=decode_round, speculative=KNOWING)
    for _ in range(2):
        assert tokens_of(ask(engine, CROWD)) == expected
    report = engine.hooks.report()
    assert (report["preempted"] > 0) == (blocks == 30) and (report["prefix"]["hit_tokens"] > 0 or blocks < 200)
    assert min(counts(engine)["accepted_at"]) > 0 and len(ragged(steps)) > 10


def test_64_prompts_in_steps_of_few_tokens(start_engine, steps):
    """With 32 sequences and 100 tokens a step there is room for two guesses of each: LMDeploy would cut a longer step."""
    draw = random.Random(2)
    shared = [draw.randint(3, 250) for _ in range(32)]
    ends = [[draw.randint(3, 250) for _ in range(draw.randint(3, 30))] for _ in range(64)]
    prompts = [shared[: draw.choice((0, 16, 32))] + end for end in ends]
    settings = dict(kv_blocks=200, max_batch_size=32, max_prefill_tokens=100)
    answers = tokens_of(ask(start_engine(**settings), prompts))
    tell(prompts, answers)
    engine = start_engine(speculative=KNOWING, speculative_options={"wrong": 0.15, "lookahead": 6}, **settings)
    steps.clear()
    assert tokens_of(ask(engine, prompts)) == answers
    assert counts(engine)["accepted"] > 100 and engine.hooks.report()["prefix"]["hit_tokens"] > 0
    guessed = [each for each in ragged(steps) if min(each) <= 7 and len(each) > 16]
    assert guessed and max(map(sum, guessed)) <= 100 and len({len(each) for each in guessed}) > 1


@pytest.mark.parametrize("decode_round", [1, 4])
def test_sampling_and_log_probabilities(start_engine, decode_round):
    prompts = make_prompts((20, 35, 50, 12, 28, 17), seed=8)
    sampled = dict(top_k=0, temperature=1.2)
    ways = [
        dict(logprobs=3), dict(sampled, random_seed=5, logprobs=1), dict(sampled, random_seed=3, repetition_penalty=0.8),
        dict(top_k=20, temperature=0.9, top_p=0.8, random_seed=7, logprobs=2), dict(repetition_penalty=1.4),
        dict(max_new_tokens=7),
    ]  # fmt: skip
    expected = ask(start_engine(decode_round=decode_round), prompts, ways)
    tell(prompts, tokens_of(expected))
    engine = start_engine(decode_round=decode_round, speculative=KNOWING, speculative_options={"wrong": 0.2})
    found = ask(engine, prompts, ways)
    assert tokens_of(found) == tokens_of(expected)
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, abs=1e-3)
    assert counts(engine)["accepted"] > 10


def test_a_draft_model(start_engine, reference, model_folder):
    engine = start_engine(speculative="draft", speculative_options={"model": str(model_folder("llama")), "lookahead": 3})
    found = engine.generate(CROWD, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    assert [each.token_ids for each in found] == reference(CROWD, NEW)
    assert counts(engine)["accepted"] == counts(engine)["drafted"] > 0


def test_a_device_that_drops_blocks_behind_the_window_is_refused(start_engine, monkeypatch):
    monkeypatch.setattr(CpuDevice, "window_size", lambda self, size: size)
    with pytest.raises(SpeculationError, match="knowing: this device drops the blocks behind the model's sliding window"):
        start_engine(model="qwen2-window", prefix_caching=False, speculative=KNOWING)
