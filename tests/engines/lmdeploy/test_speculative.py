"""Guesses in the engine: whatever is guessed and whatever happens meanwhile, the answers are those without guesses."""

import asyncio
import random

import numpy as np
import pytest
import torch

from sagellm.core.hooks import Phase
from tests.engines.lmdeploy.guesses import (
    CROWD,
    GREEDY,
    KNOWING,
    KNOWING_TREES,
    NEW,
    Knowing,
    ask,
    counts,
    tell,
    tokens_of,
)
from tests.engines.lmdeploy.test_chunks import chunked, of_request, plugin_of
from tests.engines.lmdeploy.test_exactness import cancelled
from tests.pool import check_pool, settle
from tests.reference import make_prompts

HERE = "tests.engines.lmdeploy.test_speculative:"


@pytest.mark.parametrize(("model", "blocks", "decode_round"), [
    ("llama", 30, 1), ("llama", 30, 5), ("llama", 200, 3), ("qwen2-window", 60, 1),
])  # fmt: skip
def test_greedy_equals_transformers(start_engine, reference, model, blocks, decode_round):
    expected = reference(CROWD, NEW, model)
    tell(CROWD, expected)
    engine = start_engine(model=model, kv_blocks=blocks, decode_round=decode_round, speculative=KNOWING)
    for _ in range(2):
        assert tokens_of(ask(engine, CROWD)) == expected
    whole, report = engine.hooks.report(), counts(engine)
    assert (whole["preempted"] > 0) == (blocks == 30)
    assert whole["prefix"]["hit_tokens"] > 0 or blocks < 200
    assert min(report["accepted_at"]) > 0 and min(np.subtract(report["drafted_at"], report["accepted_at"])) > 0
    assert report["tokens_per_step"] > 1.2


@pytest.mark.slow
def test_500_prompts_are_answered_as_without(start_engine):
    """In a pool that holds half of the requests of a batch; without guesses it holds all. `suffix`, which learns from answers,
    is asked some of them twice."""
    draw = random.Random(2)
    prompts = [[draw.randint(3, 250) for _ in range(draw.randint(3, 30))] for _ in range(500)]
    size, ways = dict(max_batch_size=32), [dict(max_new_tokens=8)]
    answers = tokens_of(ask(start_engine(kv_blocks=300, **size), prompts, ways))
    tell(prompts, answers)
    for strategy, options, asked, steps in (
        (KNOWING, {"wrong": 0.15}, range(500), 0.75), ("suffix", {"lookahead": 4}, [*range(90)] * 2, 0.9),
    ):  # fmt: skip
        engine = start_engine(speculative=strategy, speculative_options=options, kv_blocks=36, **size)
        found = tokens_of(ask(engine, [prompts[number] for number in asked], ways))
        assert found == [answers[number] for number in asked]
        report = counts(engine)
        assert engine.hooks.report()["preempted"] > 20 and min(report["accepted_at"]) > 0
        assert report["sequences"] < steps * 7 * len(asked)


def likes_another_token(seen):
    """A processor of a request that looks at the end of its text."""

    def process(all_ids, logits):
        seen.append(tuple(all_ids[-2:].tolist()))
        logits[(int(all_ids[-1]) * 7 + int(all_ids[-2])) % 200 + 10] += 3.0
        return logits

    return process


@pytest.mark.parametrize(("decode_round", "strategy"), [(1, KNOWING), (4, KNOWING), (1, KNOWING_TREES), (4, KNOWING_TREES)])
def test_every_way_to_sample_gives_the_same_tokens(start_engine, decode_round, strategy):
    """All of them in one batch, so that the rows of one stand beside those of another."""
    prompts = make_prompts((20, 35, 50, 12, 28, 17, 40, 22), seed=8)
    sampled = dict(top_k=0, temperature=1.2)
    seen = []
    ways = [
        dict(logprobs=3),
        dict(sampled, random_seed=5, logprobs=1),
        dict(top_k=20, temperature=0.9, top_p=0.8, min_p=0.02, random_seed=2**31 + 7),
        dict(repetition_penalty=1.4, logprobs=0),
        dict(sampled, random_seed=3, repetition_penalty=0.8, bad_token_ids=[50, 51, 52]),
        dict(logits_processors=[likes_another_token(seen)]),
        dict(max_new_tokens=7, logprobs=3),
        dict(response_format={"type": "text"}),
    ]
    plain = start_engine(decode_round=decode_round)
    expected = ask(plain, prompts, ways)
    # Words that end an answer amidst its tokens, and that may not do so at first: tokens that it does contain.
    more = ({}, {}, {}, dict(min_new_tokens=6))
    stops = [
        dict(ignore_eos=False, stop_token_ids=[answer[place]], **values)
        for (answer, _), place, values in zip(expected[:4], (9, 13, 5, 8), more, strict=True)
    ]
    if decode_round > 1:  # there LMDeploy bars the words to the end of a round, which depends on its steps
        del stops[3]["min_new_tokens"]
    with_stops = [dict(way, **stop) for way, stop in zip(ways, stops, strict=False)] + ways[4:]
    expected_stopped = ask(plain, prompts, with_stops)
    assert sum(len(tokens) < NEW for tokens in tokens_of(expected_stopped)) >= 4

    engine = start_engine(decode_round=decode_round, speculative=strategy, speculative_options={"wrong": 0.2})
    for every, wanted in ((ways, expected), (with_stops, expected_stopped)):
        seen.clear()
        tell(prompts, tokens_of(expected))
        found = ask(engine, prompts, every)
        assert tokens_of(found) == tokens_of(wanted)
        text = (*prompts[5], *wanted[5][0])
        first = len(prompts[5])
        assert seen[:NEW] == [text[first + place - 2 : first + place] for place in range(NEW)]
        for (tokens, ours), (_, theirs), way in zip(found, wanted, every, strict=True):
            if "logprobs" not in way:
                continue
            assert len(ours) == len(tokens) and len(ours[0]) == max(1, way["logprobs"])
            assert [sorted(each) for each in ours] == [sorted(each) for each in theirs]
            for one, other in zip(ours, theirs, strict=True):
                assert one == pytest.approx(other, abs=1e-3)
    assert all(sum(counts(engine)["accepted_at"][place:]) for place in range(4 if strategy == KNOWING else 2))
    strategy = engine.engine.executor.model_agent.agent_strategy.speculator.strategy
    told = strategy.ended | strategy.texts
    for number, (prompt, tokens) in enumerate(zip(prompts, tokens_of(expected_stopped), strict=True)):
        if number != 5:  # the processor's, which the strategy is not told of
            assert told[len(prompts) + number] == [*prompt, *tokens], "what is told ends where the answer does"


def test_every_token_up_to_a_least_number_may_be_guessed(start_engine, reference):
    """A word that would end the answer is barred from the rows before that number, and from none behind it."""
    (prompt,) = make_prompts((30,))
    (answer,) = reference([prompt], NEW)
    tell([prompt], [answer])
    engine = start_engine(speculative=KNOWING, speculative_options={"wrong": 0.0, "lookahead": 8})
    for least in range(1, 12):
        stop = answer[least]
        if stop in answer[:least]:
            continue
        ways = [dict(ignore_eos=False, stop_token_ids=[stop], min_new_tokens=least)]
        assert tokens_of(ask(engine, [prompt], ways)) == [answer[: least + 1]]
    assert counts(engine)["accepted"] > 10


def test_cancellations_and_shared_prefixes_under_pressure(start_engine, reference):
    texts, ends = make_prompts((48, 33), seed=3), make_prompts((20, 47, 16), seed=4)
    prompts = [text + end[:length] for text in texts for end in ends for length in (1, 16, 40)]
    expected = reference(prompts, NEW)
    tell(prompts, expected)
    engine = start_engine(kv_blocks=18, speculative=KNOWING, speculative_options={"wrong": 0.1})
    draw = random.Random(4)

    async def broken_off(prompt):
        return await cancelled(engine, prompt, 0.02 * draw.random(), after_tokens=draw.randint(0, 8))

    async def together(chosen):
        whole = [engine._one(prompt, GREEDY, 0, 0) for prompt in chosen[:5]]
        return await asyncio.gather(*whole, *map(broken_off, chosen[5:]))

    for _ in range(4):
        chosen = [draw.choice(range(len(prompts))) for _ in range(8)]
        found = engine._on_loop(together([prompts[number] for number in chosen]))
        settle(engine)
        for place, number in enumerate(chosen):
            tokens = found[place] if place >= 5 else found[place].token_ids
            assert tokens == expected[number][: len(tokens)] and (place >= 5 or len(tokens) == NEW)
        check_pool(engine)
    assert tokens_of(ask(engine, prompts[:1])) == expected[:1]
    speculator = engine.engine.executor.model_agent.agent_strategy.speculator
    assert len(speculator._texts) <= 1 and len(speculator.strategy.texts) <= 1, "texts of requests that ended"
    assert counts(engine)["accepted"] > 50 and engine.hooks.report()["preempted"]


def test_prompts_in_parts(start_engine, reference):
    """The strategy hears of a prompt when it is whole, and plug-ins of every token that a step gave."""
    prompts = make_prompts((20, 33, 150), seed=5)
    expected = reference(prompts, NEW)
    tell(prompts, expected)
    engine = start_engine(chunked(tokens=32), decode_round=1, speculative=KNOWING)
    assert tokens_of(ask(engine, prompts, delays=[0, 0, 0.02])) == expected
    assert engine.hooks.report()["chunks"] >= 4 and counts(engine)["accepted"] > 10
    strategy = engine.engine.executor.model_agent.agent_strategy.speculator.strategy
    assert sorted(strategy.begun) == [(number, len(prompt)) for number, prompt in enumerate(prompts)]
    steps = plugin_of(engine).steps
    for number, prompt in enumerate(prompts):
        rows = of_request(steps, number)
        assert sum(tokens for phase, tokens in rows if phase is Phase.PREFILL) == len(prompt)
        assert sum(tokens for phase, tokens in rows if phase is Phase.DECODE) == NEW - 1
    alone = [step for step in steps if step.phase is Phase.DECODE and [each for each, _ in step.computed] == [2]]
    context = len(prompts[2]) + NEW - sum(step.num_tokens for step in alone) - 1
    for step in alone:  # what was in the cache before each step is what those before it have left there
        assert step.num_context_tokens == context
        context += step.num_tokens


class Bad(Knowing):
    """Does one thing wrong."""

    name = "bad"

    def __init__(self, kind="raises"):
        super().__init__(4, wrong=0.0)
        self.kind = kind

    def propose(self, asks):
        right = super().propose(asks)
        made = {
            "raises": lambda: 1 / 0, "none": lambda: None, "few": lambda: right[:-1], "endless": lambda: iter(int, 1),
            "long": lambda: [[*guesses, *[5] * 9] for guesses in right], "foreign": lambda: [[320] for _ in right],
            "negative": lambda: [[-1] for _ in right], "halves": lambda: [[1.0] for _ in right],
            "words": lambda: ["12" for _ in right], "exits": lambda: exit(1),
        }  # fmt: skip
        return made[self.kind]() if self.kind in made else right

    def begin(self, request_id, tokens):
        super().begin(request_id, tokens)
        if self.kind == "begin":
            raise KeyError(request_id)

    def accept(self, request_id, tokens):
        if self.kind == "accept":
            raise KeyError(request_id)
        super().accept(request_id, tokens)

    def step_done(self, outcome):
        if self.kind == "step_done":
            raise KeyError
        if self.kind == "lookahead":
            self.lookahead = None
        if self.kind == "quiet":
            self.joins, self.quiet, self.lookahead = True, "often", 0

    def report(self):
        return {"odd": {1, 2}} if self.kind == "report" else {}


# Words of the report for each kind of fault.
FAULTS = {
    "raises": "propose: ZeroDivisionError: division by zero", "none": "propose: TypeError: ", "few": "propose: it answered 0 ",
    "endless": "propose: it answered 2 proposals, or more, for 1 sequences", "long": "propose: more than 4 tokens",
    "foreign": "propose: token 320; the vocabulary has 0 to 319", "negative": "propose: token -1; the vocabulary has 0 to 319",
    "halves": "propose: a proposal is a list of whole numbers (TypeError: 'float'",
    "words": "propose: a proposal is a list of whole numbers (TypeError: 'str'", "exits": "propose: SystemExit: 1",
    "begin": "begin: KeyError: 0", "accept": "accept: KeyError: 0", "step_done": "step_done: KeyError: ",
    "lookahead": "its lookahead makes no sense: TypeError: ", "quiet": "its quiet makes no sense: TypeError: ",
    "report": "report: TypeError: Object of type set is not JSON serializable",
}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_a_bad_strategy_stops_nobody(start_engine, reference, kind, caplog):
    prompts = CROWD[:3]
    expected = reference(prompts, NEW)
    tell(prompts, expected)
    engine = start_engine(speculative=HERE + "Bad", speculative_options={"kind": kind})
    assert tokens_of(ask(engine, prompts)) == expected
    report = counts(engine, faults=1 if kind in ("lookahead", "quiet", "report") else 3)
    assert report["first_fault"].startswith(FAULTS[kind])
    (said,) = [record.message for record in caplog.records if "speculative strategy bad" in record.message]
    assert report["first_fault"] in said


class Free(Knowing):
    """Answers in forms that a list of whole numbers may have, and changes its mind on how many guesses there may be: also
    none, for two steps."""

    name = "free"
    silent = 0

    def propose(self, asks):
        self.lookahead = np.int64((self.lookahead + 5) % 9)
        return (np.array(guesses, np.int32) for guesses in super().propose(asks))

    def step_done(self, outcome):
        if not self.lookahead and outcome.num_rows == len(outcome.verdicts):
            self.silent += 1
            self.lookahead = 5 * (self.silent % 2 == 0)


@pytest.mark.parametrize("decode_round", [1, 4])
def test_what_may_be_answered(start_engine, reference, decode_round):
    tell(CROWD[:4], reference(CROWD[:4], NEW))
    settings = dict(kv_blocks=120, decode_round=decode_round)
    engine = start_engine(speculative=HERE + "Free", speculative_options={"wrong": 0.05}, **settings)
    for _ in range(2):
        assert tokens_of(ask(engine, CROWD[:4])) == reference(CROWD[:4], NEW)
    report = counts(engine)
    assert len(report["drafted_at"]) > 4 and report["accepted"] > 10
    assert engine.engine.executor.model_agent.agent_strategy.speculator.strategy.silent > 4


class Resting(Knowing):
    """A step with guesses, then three without, of which it need not be told at once. `steps`: all of which it was told."""

    name = "resting"
    joins = True

    def __init__(self, wrong=0.2):
        super().__init__(4, wrong)
        self.steps = []

    def accept(self, request_id, tokens):
        assert request_id in self.texts
        super().accept(request_id, tokens)

    def step_done(self, outcome):
        assert not self.quiet or outcome.num_rows == len(outcome.verdicts), "guesses of a step that was to be quiet"
        self.steps.append(outcome)
        self.quiet = -len(self.steps) % 4
        self.lookahead = 0 if self.quiet else 4


@pytest.mark.parametrize(("decode_round", "blocks"), [(1, 200), (4, 200), (1, 30), (5, 30)])
def test_one_that_is_quiet_hears_everything_in_the_end(start_engine, reference, decode_round, blocks):
    """Also where answers end amidst a round, where requests lose their places, and where they end between two looks."""
    whole = reference(CROWD, NEW)
    tell(CROWD, whole)
    ways = [dict(ignore_eos=False, stop_token_ids=[answer[7 + place]]) for place, answer in enumerate(whole)]
    wanted = [answer[: answer.index(answer[7 + place]) + 1] for place, answer in enumerate(whole)]
    for place in (0, 3, 6):
        ways[place], wanted[place] = dict(max_new_tokens=NEW - place), whole[place][: NEW - place]
    engine = start_engine(decode_round=decode_round, kv_blocks=blocks, speculative=HERE + "Resting")
    for start in (0, len(CROWD)):
        assert tokens_of(ask(engine, CROWD, ways)) == wanted
        speculator = engine.engine.executor.model_agent.agent_strategy.speculator
        speculator._tell_late()  # as with the next step, which no request asks for
        told = speculator.strategy.ended | speculator.strategy.texts
        assert [told[start + place] for place in range(len(CROWD))] == [
            [*prompt, *tokens] for prompt, tokens in zip(CROWD, wanted, strict=True)
        ]
    report, steps = counts(engine), speculator.strategy.steps
    assert (engine.hooks.report()["preempted"] > 0) == (blocks == 30)
    assert len(steps) == report["steps"] and sum(len(step.verdicts) for step in steps) == report["sequences"]
    assert sum(step.step_s for step in steps) == pytest.approx(report["step_s"]) and report["accepted"] > 10
    assert sum(verdict.num_accepted for step in steps for verdict in step.verdicts) == report["accepted"]


def test_rows_keep_the_ends_of_texts():
    from sagellm.engines.lmdeploy.speculative.verify import with_tails

    texts = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert with_tails(texts, [[], [7], [8, 9]]).tolist() == [[1, 1, 1, 2], [3, 3, 4, 7], [5, 6, 8, 9]]
