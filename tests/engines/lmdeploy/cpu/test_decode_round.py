"""Native decode rounds in the engine: the answers are those of LMDeploy's own steps, whatever is asked."""

import pytest

from sagellm.engines.lmdeploy.cpu import decode_round
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

    def counted(*args, **kwargs) -> bool:
        ran = not Counted.is_off and run_round(*args, **kwargs)
        Counted.native += ran
        Counted.others += not ran
        return ran

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


@pytest.mark.parametrize("other", OTHERS, ids=["processor", "grammar"])
def test_a_request_of_another_kind_changes_no_answer_beside_it(start_engine, rounds, other):
    prompts = make_prompts((20, 35, 50, 12, 28), seed=8)
    engine = start_engine()
    expected = tokens_of(ask(engine, prompts, PLAIN))
    rounds.native = rounds.others = 0
    found = tokens_of(ask(engine, [*prompts, *make_prompts((17,), seed=9)], [*PLAIN, other]))
    assert found[: len(PLAIN)] == expected and rounds.others > 0
