"""Chains of thought on a running engine."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from sagellm.accel import CoTAccelController, CoTStep
from sagellm.accel.cot.controller import LikelyStep, StepJudge, last_number
from sagellm.accel.cot.steps import Correction, find_split, make_steps
from sagellm.accel.speculative.base import SpeculativeStrategy
from sagellm.core.errors import ConfigError, EngineError
from sagellm.core.running import Draft, SamplingParams
from sagellm.demo_model import ensure_demo_model
from tests.pool import settle
from tests.sweeps import slow_but

QUESTION = "How do I read a file?"
SIZES = dict(kv_blocks=160, context_length=2048)
NEW = 96
LONG = SamplingParams(ignore_eos=True)  # the demo model writes few lines, and then others


class Wrong(SpeculativeStrategy):
    """Guesses that are right for some tokens and then wrong, over several steps of the chain at once."""

    name = "wrong"
    told: tuple[int, ...] = ()  # the right chain
    good = 5

    def propose(self, asks):
        proposals = []
        for ask in asks:
            place = next((n for n in range(len(self.told), 0, -1) if [*ask.tokens[-n:]] == [*self.told[:n]]), 0)
            right = list(self.told[place : place + ask.limit])
            right[self.good :] = [token + 1 for token in right[self.good :]]
            proposals.append(right)
        return proposals


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(ensure_demo_model())


def start(start_engine, dtype="float32", **config):
    return start_engine(model=ensure_demo_model(), dtype=dtype, **SIZES | config)


def plain(engine, controller, new=NEW, **params):
    """The chain without guesses, from an engine that has none."""
    prompt, _ = controller._prompt(QUESTION)
    return engine.generate([prompt], SamplingParams(new, stop_token_ids=controller._ends, **params))[0].token_ids


def joined(answer_or_chain):
    return tuple(token for step in answer_or_chain.steps for token in step.token_ids)


@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], "float32"))
def test_an_exact_chain_is_that_of_plain_decoding(start_engine, tokenizer, dtype):
    alone = start(start_engine, dtype)
    engine = start(start_engine, dtype, speculative="suffix", speculative_options={"lookahead": 64, "max_depth": 128})
    controller = CoTAccelController(engine, tokenizer)
    expected = plain(alone, controller)
    first, second = (controller.accelerate_cot(QUESTION, max_new_tokens=NEW) for _ in range(2))
    for answer in (first, second):
        assert answer.chains[0].token_ids == expected == joined(answer)
        for step in answer.steps:
            assert len(step.draft_tokens) == len(step.verification_result) and not step.is_judged
            for place, drafted, written in step.corrections:
                assert step.token_ids[place] == written != drafted and drafted in step.draft_tokens
        assert sum(each.num_accepted for each in answer.steps) == answer.stats["accepted"]
        assert answer.stats["passes"] == len(expected) - answer.stats["accepted"]
    assert len(second.steps) > 1
    # The first chain guesses the second: whole steps are verified in one pass, and few passes are left.
    assert second.stats["passes"] <= len(expected) // 8 < first.stats["passes"]
    report = engine.hooks.report()["speculation"]
    assert report["accepted"] == first.stats["accepted"] + second.stats["accepted"]
    assert report["drafted"] >= first.stats["drafted"] + second.stats["drafted"]


@pytest.mark.parametrize("split", slow_but(["line", "sentence", "e"], "e"))
def test_guesses_over_several_steps_are_taken_back(start_engine, tokenizer, split):
    """Each pass verifies 24 guesses and parts at the sixth, steps before the last guess: the engine steps back every time."""
    alone = start(start_engine)
    Wrong.told = ()
    engine = start(start_engine, speculative=f"{__name__}:Wrong", speculative_options={"lookahead": 24})
    controller = CoTAccelController(engine, tokenizer, split)
    Wrong.told = expected = plain(alone, controller, ignore_eos=True)
    answer = controller.accelerate_cot(QUESTION, max_new_tokens=NEW, params=LONG)
    assert answer.chains[0].token_ids == expected == joined(answer)
    corrections = [each for step in answer.steps for each in step.corrections]
    assert len(corrections) >= 8 and all(drafted == written + 1 for _, drafted, written in corrections)
    assert answer.stats["accepted"] >= 5 * len(corrections)
    alike = CoTAccelController(alone, tokenizer, split).accelerate_cot(QUESTION, max_new_tokens=NEW, params=LONG)
    assert [each.token_ids for each in alike.steps] == [each.token_ids for each in answer.steps]
    assert alike.stats["drafted"] == 0 and alike.stats["latency_saved"] == 0


def test_samples_share_the_prompt_and_vote(start_engine, tokenizer):
    alone = start(start_engine)
    engine = start(start_engine, speculative="chain")
    controller = CoTAccelController(engine, tokenizer, vote=lambda text: text[:6])
    params = SamplingParams(temperature=0.7, seed=11)
    answer = controller.accelerate_cot(QUESTION, samples=6, max_new_tokens=32, params=params)
    for number, chain in enumerate(answer.chains):
        assert chain.token_ids == plain(alone, controller, 32, temperature=0.7, seed=11 + number) == joined(chain)
    forks = engine.hooks.report()["forks"]
    assert forks["branches"] == 5 and forks["shared_tokens"] >= 5 * (len(controller._prompt(QUESTION)[0]) - 1)
    assert sum(answer.votes.values()) == 6 and answer.votes[answer.answer] == max(answer.votes.values())
    chosen = next(each for each in answer.chains if each.answer == answer.answer)
    assert (answer.text, answer.steps) == (chosen.text, chosen.steps)
    again = controller.accelerate_cot(QUESTION, samples=6, max_new_tokens=32, params=params)
    # Equal numbers choose equal tokens behind equal texts: all guesses are right.
    assert [chain.token_ids for chain in again.chains] == [chain.token_ids for chain in answer.chains]
    assert again.stats["acceptance"] > 0.98 and again.stats["passes"] < answer.stats["passes"] / 3
    settle(engine)


class Sequel(StepJudge):
    """Accepts drafts; with the number of the case it takes steps back."""

    def __init__(self, backs):
        self.backs, self.cases = backs, []

    def judge(self, case):
        self.cases.append(case)
        return self.backs.get(len(self.cases), 0)


def semantic(engine, tokenizer, judge, **options):
    return CoTAccelController(engine, tokenizer, accept="semantic", judge=judge, **options)


def test_a_judge_takes_several_steps_back_several_times(start_engine, tokenizer):
    """Drafts come from the first chain. Without a step back the second is that chain; with some the model writes on from the
    text before the steps that were taken back."""
    engine = start(start_engine)
    judge = Sequel({})
    controller = semantic(engine, tokenizer, judge)
    first = controller.accelerate_cot(QUESTION, max_new_tokens=NEW, params=LONG)
    assert not judge.cases and first.chains[0].token_ids == plain(engine, controller, ignore_eos=True)
    assert len(first.steps) >= 5
    second = controller.accelerate_cot(QUESTION, max_new_tokens=NEW, params=LONG)
    assert len(judge.cases) == len(first.steps) and all(each.is_judged for each in second.steps)
    assert joined(second) == joined(first)
    judge.cases, judge.backs = [], {1: 1, 4: 3, 6: 3}  # the first draft is rejected; later two steps before one go with it
    third = controller.accelerate_cot(QUESTION, max_new_tokens=NEW, params=LONG)
    # The model is greedy: what it writes again is what it wrote.
    assert third.chains[0].taken_back == (2, 2) and joined(third) == joined(first)
    texts = [each.text for each in first.steps]
    assert [len(case.steps) for case in judge.cases[:7]] == [0, 1, 2, 3, 2, 3, 2]
    assert all(list(case.steps) == texts[: len(case.steps)] for case in judge.cases)
    rejected = third.steps[0]
    assert not rejected.is_judged and rejected.draft_tokens == first.steps[0].token_ids
    settle(engine)


def test_a_judge_lets_wrong_steps_pass_and_the_score_tells_them(start_engine, tokenizer):
    """Semantic mode is lossy: what the model goes on with follows the draft, not its own chain."""
    engine = start(start_engine)
    judge = Sequel({})
    controller = semantic(engine, tokenizer, judge)
    own = controller.accelerate_cot(QUESTION, max_new_tokens=NEW)
    prompt, _ = controller._prompt(QUESTION)
    odd = tokenizer("Purple elephants seldom whistle.\n", add_special_tokens=False).input_ids
    controller._earlier = {prompt: [(CoTStep("", tuple(odd)),)]}
    lossy = controller.accelerate_cot(QUESTION, max_new_tokens=NEW)
    assert lossy.steps[0].is_judged and lossy.steps[0].token_ids == tuple(odd)
    on = engine.generate([[*prompt, *odd]], SamplingParams(NEW - len(odd), stop_token_ids=controller._ends))[0].token_ids
    assert lossy.chains[0].token_ids == (*odd, *on)
    strict = semantic(engine, tokenizer, LikelyStep(-3.0))
    strict._earlier = {prompt: [(CoTStep("", tuple(odd)),)]}
    assert judge.cases[-1].score() < -3.0
    assert joined(strict.accelerate_cot(QUESTION, max_new_tokens=NEW)) == joined(own)
    assert joined(strict.accelerate_cot(QUESTION, max_new_tokens=NEW)) == joined(own)  # whose steps are likely, and drafted


def test_an_engine_drafts_steps(start_engine, tokenizer):
    engine, other = start(start_engine), start(start_engine)
    judge = Sequel({})
    answer = semantic(engine, tokenizer, judge, draft_engine=other).accelerate_cot(QUESTION, max_new_tokens=NEW)
    assert all(each.is_judged for each in answer.steps) and len(judge.cases) == len(answer.steps)
    assert joined(answer) == plain(engine, semantic(engine, tokenizer, judge))


def test_fork_from_an_earlier_place(start_engine, tokenizer):
    engine = start(start_engine)
    prompt = list(range(5, 45))
    request = engine.start(prompt, SamplingParams(24, ignore_eos=True), keep=True)
    whole = request.result().token_ids
    branches = engine.fork(request, [[], []], replace(request.params, max_new_tokens=10), num_tokens=7)
    assert branches.num_shared == 47 and [each.token_ids for each in branches.join()] == [whole[7:17]] * 2
    with pytest.raises(EngineError, match="num_tokens 25; allowed are 0 to 24"):
        engine.fork(request, [[]], num_tokens=25)
    assert request.drafts == []
    request.cancel()
    settle(engine)


@pytest.mark.parametrize(
    ("rule", "text", "starts"),
    [
        ("line", "One\n\nTwo\n Three\n", [5, 10]),
        ("line", "\n\nOne", []),
        ("sentence", "She has 3.5 eggs. So 4.\nEnd", [18, 24]),
        ("sentence", "1. First thing\n2. Second", [15]),
        ("Step ", "Step 1: a. Step 2: b\nStep 3", [11, 21]),
    ],
)
def test_splits(rule, text, starts):
    assert find_split(rule)(text) == starts


def test_steps_by_hand(tokenizer):
    tokens = tokenizer("One.\nTwo three.\nFour.", add_special_tokens=False).input_ids
    lines = [step.text for step in make_steps(tokens, [], find_split("line"), tokenizer)]
    assert lines == ["One.\n", "Two three.\n", "Four."]
    sizes = [len(step.token_ids) for step in make_steps(tokens, [], find_split("line"), tokenizer)]
    right = (*tokens[: sizes[0] + 1], tokens[sizes[0] + 1] + 1, 7)  # over the first border, then wrong
    dropped = Draft(1, (9,))
    steps = make_steps(tokens, [Draft(0, right), dropped], find_split("line"), tokenizer)
    assert steps[0].draft_tokens == tuple(tokens[: sizes[0]]) and all(steps[0].verification_result)
    assert steps[1].draft_tokens == right[sizes[0] :] and steps[1].verification_result == (True, False, False)
    assert steps[1].corrections == (Correction(1, right[-2], tokens[sizes[0] + 1]),)
    assert not steps[2].draft_tokens and make_steps([], [], find_split("line"), tokenizer) == ()


def test_votes():
    assert [last_number(text) for text in ("so 1,200.", "x = -3.50 m", "no\nYes \n\n", "")] == ["1200", "-3.50", "Yes", ""]


def test_bad_input(start_engine, tokenizer):
    engine = start(start_engine)
    controller = CoTAccelController(engine, tokenizer)
    with pytest.raises(ConfigError, match="the question is empty"):
        controller.accelerate_cot([])
    with pytest.raises(ConfigError, match="samples is 0; give a whole number from 1 to 128"):
        controller.accelerate_cot(QUESTION, samples=0)
    with pytest.raises(ConfigError, match="3 samples at temperature 0 are all equal"):
        controller.accelerate_cot(QUESTION, samples=3, params=SamplingParams())
    with pytest.raises(ConfigError, match="accept is 'fast'; give exact, or semantic, which is lossy"):
        CoTAccelController(engine, tokenizer, accept="fast")
    with pytest.raises(ConfigError, match="needs a judge"):
        CoTAccelController(engine, tokenizer, accept="semantic")
    with pytest.raises(ConfigError, match="belong to accept='semantic'"):
        CoTAccelController(engine, tokenizer, judge=LikelyStep())
    with pytest.raises(ConfigError, match="split is ' '; give line, sentence, or a marker"):
        CoTAccelController(engine, tokenizer, " ")
    far = semantic(engine, tokenizer, Sequel({1: 9}))
    far.accelerate_cot(QUESTION, max_new_tokens=8)
    with pytest.raises(ConfigError, match="Sequel took 9 steps back; there are 1 with the draft"):
        far.accelerate_cot(QUESTION, max_new_tokens=8)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="messages need a model with a chat template"):
        controller.accelerate_cot([{"role": "user", "content": QUESTION}])
    assert controller.accelerate_cot("def read(", max_new_tokens=8).chains[0].token_ids


def test_the_command():
    from sagellm.cli.cot import cot

    arguments = [QUESTION, "--model", "demo", "--device", "cpu", "--threads", "1", "--max-tokens", "24"]
    found = CliRunner().invoke(cot, [*arguments, "--samples", "3", "--json"])
    answer = json.loads(found.stdout)
    assert found.exit_code == 0 and len(answer["chains"]) == 3 and sum(answer["votes"].values()) == 3
    assert answer["stats"]["drafted"] > 0
    plain = CliRunner().invoke(cot, [*arguments, "--samples", "3", "--json", "--speculative", "none"])
    alike = json.loads(plain.stdout)
    assert alike["votes"] == answer["votes"] and alike["stats"]["drafted"] == 0
    shown = CliRunner().invoke(cot, [*arguments, "--show", "steps"])
    assert shown.exit_code == 0 and "1. " in shown.output and "guesses" in shown.output
    assert CliRunner().invoke(cot, [*arguments, "--split", " "]).exit_code == 1
