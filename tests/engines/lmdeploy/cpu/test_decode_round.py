"""Native decode rounds in the engine: the answers are those of LMDeploy's own steps, whatever is asked."""

import pytest
import torch

from sagellm import _core
from sagellm.engines.lmdeploy.cpu import decode_round
from sagellm.engines.lmdeploy.cpu.ready_step import ReadyStep
from sagellm.engines.lmdeploy.cpu.run_ahead import FEWEST_RIGHT, RunAhead
from tests.engines.lmdeploy.guesses import ask, tokens_of
from tests.reference import make_prompts

SAMPLED = dict(top_k=0, temperature=1.2)
PLAIN = [
    dict(logprobs=3),
    dict(SAMPLED, random_seed=5, logprobs=1),
    dict(top_k=20, temperature=0.9, top_p=0.8, min_p=0.02, random_seed=2**31 + 7),
    dict(SAMPLED, random_seed=3, repetition_penalty=0.8, bad_token_ids=[50, 51, 52]),
    dict(max_new_tokens=7, top_k=0, top_p=0.5, random_seed=1),
]
OTHERS = [
    dict(logits_processors=[lambda all_ids, logits: logits]),
    dict(response_format={"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "integer"}}}),
]


@pytest.fixture
def rounds(monkeypatch):
    """Count rounds by whether they ran natively. With `is_off` none does."""

    class Counted:
        native = others = 0
        is_off = False

    run_round = decode_round.run_round

    def counted(*args, **kwargs):
        rest = None if Counted.is_off else run_round(*args, **kwargs)
        Counted.native += rest is not None
        Counted.others += rest is None
        return rest

    monkeypatch.setattr(decode_round, "run_round", counted)
    return Counted


def check_rounds(engine, rounds, least: int) -> None:
    """Answers and log probabilities are those of LMDeploy's own steps."""
    prompts = make_prompts((20, 35, 50, 12, 28), seed=8)
    found = ask(engine, prompts, PLAIN)
    assert rounds.native >= least
    rounds.is_off = True
    expected = ask(engine, prompts, PLAIN)
    assert tokens_of(found) == tokens_of(expected)
    for (_, ours), (_, theirs) in zip(found[:2], expected[:2], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("model", ["llama", "qwen2"])
@pytest.mark.parametrize("steps", [1, 4])
def test_answers_and_log_probabilities_are_those_of_lmdeploys_own_steps(start_engine, rounds, model, steps):
    check_rounds(start_engine(model=model, decode_round=steps), rounds, 20 // steps)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("strategy", ["ngram", ("suffix", {"tree": True})], ids=["chains", "trees"])
def test_guesses_are_computed_and_sampled_in_the_same_rounds(start_engine, rounds, strategy, steps):
    name, options = strategy if isinstance(strategy, tuple) else (strategy, {})
    engine = start_engine(speculative=name, speculative_options=options, decode_round=steps)
    check_rounds(engine, rounds, 1)
    assert engine.hooks.report()["speculation"]["drafted"] > 0


@pytest.mark.parametrize("steps", [1, 4])
def test_requests_end_where_lmdeploys_own_steps_end_them(start_engine, rounds, steps):
    prompts, words = make_prompts((20, 35, 50), seed=8), list(range(0, 256, 2))
    ends = [dict(stop_token_ids=words), dict(stop_token_ids=words, min_new_tokens=9), dict(stop_token_ids=[1])]
    every = [dict(SAMPLED, random_seed=place, ignore_eos=False, **end) for place, end in enumerate(ends)]
    engine = start_engine(decode_round=steps)
    found = tokens_of(ask(engine, prompts, every))
    assert len(found[0]) < 9 <= len(found[1]) < len(found[2]) and rounds.native
    rounds.is_off = True
    assert tokens_of(ask(engine, prompts, every)) == found


@pytest.mark.parametrize("other", OTHERS, ids=["processor", "grammar"])
def test_a_request_of_another_kind_changes_no_answer_beside_it(start_engine, rounds, other):
    prompts = make_prompts((20, 35, 50, 12, 28), seed=8)
    engine = start_engine()
    expected = tokens_of(ask(engine, prompts, PLAIN))
    rounds.native = rounds.others = 0
    found = tokens_of(ask(engine, [*prompts, *make_prompts((17,), seed=9)], [*PLAIN, other]))
    assert found[: len(PLAIN)] == expected and rounds.others > 0


def check_as_without_running_ahead(engine, prompts, every, delays=None) -> None:
    """Answers do not depend on steps that run ahead."""
    agent = engine.engine.executor.model_agent
    ahead = agent.sage_ahead
    found = ask(engine, prompts, every, delays)
    used = ahead.used
    assert used > 0
    agent.sage_ahead = None
    assert tokens_of(ask(engine, prompts, every, delays)) == tokens_of(found)
    assert ahead.used == used


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("schema", ["float32", "int4"])
def test_a_step_that_ran_ahead_is_the_step_that_the_engine_asks_for(start_engine, steps, schema):
    # 24 blocks of 16 tokens: requests meet each other's freed blocks, and some are sent back.
    engine = start_engine(decode_round=steps, kv_schema=schema, kv_blocks=24)
    prompts = make_prompts((20, 35, 50, 12, 28, 44, 17, 61), seed=8)
    every = [*PLAIN, dict(max_new_tokens=40), dict(max_new_tokens=33), dict(SAMPLED, random_seed=9, max_new_tokens=150)]
    check_as_without_running_ahead(engine, prompts, every, [0.02 * place for place in range(len(prompts))])


def test_steps_run_ahead_again_and_again(start_engine):
    engine = start_engine()
    ask(engine, make_prompts((20,), seed=8), [dict(max_new_tokens=60)])
    assert engine.hooks.report()["ahead"]["used"] >= 60 - 1 - 2 * FEWEST_RIGHT
    assert engine.hooks.report()["ahead"]["wasted"] == 0


def test_no_step_runs_ahead_while_a_prompt_waits(start_engine):
    engine = start_engine()
    engine.engine.executor.model_agent.sage_ahead._is_prompt_waiting = lambda: True
    ask(engine, make_prompts((20,), seed=8))
    assert engine.hooks.report()["ahead"] == {"used": 0, "wasted": 0}


@pytest.mark.parametrize("config", [dict(speculative="ngram"), dict(sparsity="streaming")], ids=["guesses", "sparse"])
def test_no_step_with_a_memory_runs_ahead(start_engine, config):
    engine = start_engine(**config)
    assert engine.hooks.report()["ahead"] is None
    assert not hasattr(engine.engine.executor.model_agent, "sage_ahead")


def test_wrong_forecasts_become_rare():
    def step(token: int) -> ReadyStep:
        one = torch.tensor([token])
        return ReadyStep(True, one, one, one, one, one[None], {}, None, ())

    class Runner:
        def follow(self, step, drawn):
            step.tokens += 1

        def run(self, expected, hand_over):
            return [(int(expected.tokens), [], [])]

    ahead, runner = RunAhead(lambda: False), Runner()
    for place in range(1000):  # two right forecasts, then a wrong one
        ahead.expect(step(place), [(place + 1, [], [])])
        ran = ahead.is_due
        if ran:
            ahead.prepare(runner)
            ahead.run(runner, lambda: None)
        is_right = place % 3 != 2
        taken = ahead.take(runner, step(place + 1 if is_right else 0), 16)
        assert taken == ([(place + 1, [], [])] if ran and is_right else None)
    assert 0 < ahead.wasted < 3


@pytest.mark.parametrize("name", ["tokens", "positions", "queries", "lengths", "tables", "wishes"])
def test_steps_differ_in_any_part_that_is_read(name):
    def step() -> ReadyStep:
        rows = [torch.tensor([each, each + 1]) for each in (5, 40, 1, 41)]
        return ReadyStep(True, *rows, torch.tensor([[3, 4, 5, 0], [6, 7, 8, 9]]), {}, {"seeds": [1, 2]}, ())

    one, other = step(), step()
    assert one.is_same_as(other, 16)
    if name == "wishes":
        other.wishes = {"seeds": [1, 3]}
    elif name == "tables":
        other.tables[0, 3] = 10  # after the blocks of 41 tokens
        assert one.is_same_as(other, 16)
        other.tables[1, 2] = 10
    else:
        getattr(other, name)[1] += 1
    assert not one.is_same_as(other, 16)


def test_a_step_is_turned_into_the_one_after_it():
    rows = {"tokens": [5, 6], "positions": [9, 40], "lengths": [10, 41]}
    tensors = {name: torch.tensor(values) for name, values in rows.items()}
    step = {name: each.data_ptr() for name, each in tensors.items()} | {"num_tokens": 2, "num_sequences": 2}
    with pytest.raises(ValueError, match="one token of each sequence"):
        _core.CpuDecoder.advance(step, [7])
    with pytest.raises(ValueError, match="one token of each sequence"):
        _core.CpuDecoder.advance(step | {"num_tokens": 3}, [7, 8])
    assert {name: each.tolist() for name, each in tensors.items()} == rows
    assert _core.CpuDecoder.advance(step, [7, 8]) == 42
    assert {name: each.tolist() for name, each in tensors.items()} == {
        "tokens": [7, 8], "positions": [10, 41], "lengths": [11, 42]
    }  # fmt: skip
