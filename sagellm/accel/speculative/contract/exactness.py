"""Checks of a whole engine: that guesses change nothing of what a model says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from sagellm.accel.speculative.contract.fit import BROKEN_SIGMAS, deviation
from sagellm.core.contract import Played, Report, Scenario
from sagellm.core.errors import SageError

__all__ = ["BF16_GAP", "ENGINE_SCENARIOS", "Guesser", "Trial"]

GUESSERS = "sagellm.accel.speculative.contract.guessers:"
# Logits of these models have a standard deviation of 4, and the best two are 1 apart in the median. A right engine in bfloat16
# chose tokens up to 0.31 under the highest logit of a pass over the whole text, in 480 tokens.
BF16_GAP = 0.75
NUM_PROMPTS, NUM_NEW = 10, 16
PROMPT_TOKENS = 10, 250  # from, and up to; every model of a trial has these
# A draw on the border of two tokens is decided by rounding: in a right engine one of 1,200 such answers differed. So one of ten
# does in a check of 120, and two do in one of 30,000.
DRAWN_APART = 1
NUM_DRAWS = 800


class Guesser(NamedTuple):
    """A strategy by name, and its options. `models`: folders that it loads beside the target."""

    name: str
    options: dict
    models: tuple[Path, ...] = ()


class Trial(Protocol):
    """An engine on tiny models of its own, in bfloat16 and, where `has_float32`, in float32. `vocab_size`: of the one that it
    takes by default; every model has 250 tokens or more."""

    vocab_size: int
    has_float32: bool

    def generate(
        self, prompts: Sequence[Sequence[int]], num_new: int, *, guesser: Guesser | None, dtype: str = "float32",
        decode_round: int = 1, seeds: Sequence[int] | None = None, model: Path | None = None,
    ) -> list[tuple[int, ...]]:  # fmt: skip
        """Answers of so many tokens, greedy, or drawn at temperature 1 with a seed for each prompt; of the model in
        that folder, by default of a tiny one.

        Raises SageError: the engine failed, or the guesser did something wrong in it.
        """
        ...

    def logits(self, texts: Sequence[Sequence[int]], dtype: str = "float32", model: Path | None = None) -> np.ndarray:
        """float [texts, n, vocabulary] of texts of one length, by another implementation, each in one pass."""
        ...

    def fellow(self, draft: Path, dtype: str = "float32") -> Path:
        """The folder of a tiny model with the tokens of `draft`, which can guess for it. Raises SageError: none can be made."""
        ...


class _Try(NamedTuple):
    guesser: Guesser
    model: Path | None = None
    decode_round: int = 1
    seeds: Sequence[int] | None = None


def _prompts(seed: int) -> list[list[int]]:
    """Half of them repeat themselves."""
    draw = np.random.default_rng(seed)
    words = draw.integers(*PROMPT_TOKENS, (NUM_PROMPTS, 8))
    return [
        [*row, *row, *row[:4]] if number % 2 else draw.integers(*PROMPT_TOKENS, 20).tolist()
        for number, row in enumerate(words.tolist())
    ]


def _partly_right(
    trial: Trial, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], seed: int,
    kind: str = "PartlyRightStrategy", **options: Any,
) -> Guesser:
    """Its errors are the second likeliest tokens: those that a careless check lets pass."""
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    second = np.argsort(trial.logits(texts), axis=-1)[..., -2]
    likely = [[0, *row[:-1]] for row in second.tolist()]  # the logits at a place are for the token behind it
    return Guesser(GUESSERS + kind, {"texts": texts, "likely": likely, "seed": seed} | options)


def greedy(trial: Trial, guesser: Guesser, seed: int, report: Report) -> Played:
    """Tokens as those of the same engine without guesses, greedy and drawn with seeds: with this strategy, and with one that is
    right now and then.

    Trees of guesses are among these.

    One with models of its own guesses for a target that they know nothing of, and for themselves: there its guesses are right,
    and where tokens are drawn some are.
    """
    prompts = _prompts(seed)
    seeds = [seed * NUM_PROMPTS + number + 1 for number in range(NUM_PROMPTS)]
    answers, drawn = (trial.generate(prompts, NUM_NEW, guesser=None, seeds=each) for each in (None, seeds))
    judged = {"verifier": guesser.options.get("verifier")}
    partly_right, right_of_drawn = (_partly_right(trial, prompts, each, seed, **judged) for each in (answers, drawn))
    kind = "PartlyRightTreeStrategy"
    trees = [_partly_right(trial, prompts, each, seed, kind, lookahead=12, **judged) for each in (answers, drawn)]
    pausing = _partly_right(trial, prompts, answers, seed, "PausingStrategy")
    model = trial.fellow(guesser.models[0]) if guesser.models else None
    tries = [_Try(guesser, model), _Try(guesser, model, seeds=seeds)]
    for folder in guesser.models:
        tries += [_Try(guesser, folder), _Try(guesser, folder, 4, seeds)]
    tries += [_Try(each, decode_round=steps) for each, steps in ((partly_right, 1), (partly_right, 4), (pausing, 3))]
    tries += [_Try(right_of_drawn, seeds=seeds), _Try(trees[0], decode_round=3), _Try(trees[1], seeds=seeds)]
    for each in tries:
        expected = trial.generate(prompts, NUM_NEW, guesser=None, model=each.model, seeds=each.seeds)
        try:
            found = trial.generate(
                prompts, NUM_NEW, guesser=each.guesser, model=each.model, decode_round=each.decode_round, seeds=each.seeds
            )
        except SageError as error:
            report("runs", f"{each.guesser.name}: {error}")
            continue
        apart = [number for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)) if ours != theirs]
        if len(apart) > (DRAWN_APART if each.seeds else 0):
            ours, theirs = found[apart[0]], expected[apart[0]]
            place = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
            report(
                "greedy",
                f"with {each.guesser.name}, {each.decode_round} decode steps a round, {len(apart)} of {len(found)} "
                f"{'drawn' if each.seeds else 'greedy'} answers differ: prompt {apart[0]} got at place {place} "
                f"{ours[place : place + 1]}; without guesses it is {theirs[place : place + 1]}.",
            )
    return Played(len(prompts) * len(tries), {"runs", "greedy"})


def near_argmax(trial: Trial, guesser: Guesser, seed: int, report: Report) -> Played:
    """In bfloat16 a batch of another shape rounds otherwise, so tokens may differ: but never to one that is unlikely."""
    prompts = _prompts(seed)
    first = trial.generate(prompts, NUM_NEW, guesser=None, dtype="bfloat16")
    target = trial.fellow(guesser.models[0], "bfloat16") if guesser.models else None
    for each, model in ((guesser, target), (_partly_right(trial, prompts, first, seed), None)):
        try:
            found = trial.generate(prompts, NUM_NEW, guesser=each, dtype="bfloat16", model=model)
        except SageError as error:
            report("runs", f"{each.name}: {error}")
            continue
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, found, strict=True)]
        logits = trial.logits(texts, "bfloat16", model)
        for number, answer in enumerate(found):
            rows = logits[number, -NUM_NEW - 1 : -1]
            gaps = rows.max(-1) - rows[np.arange(NUM_NEW), list(answer)]
            worst = int(gaps.argmax())
            if gaps[worst] > BF16_GAP:
                report(
                    "near_argmax",
                    f"with {each.name}, prompt {number} got at place {worst} a token whose logit is {gaps[worst]:.2f} under "
                    f"the highest; rounding explains {BF16_GAP}.",
                )
    return Played(len(prompts) * 2, {"runs", "near_argmax"})


def distribution(trial: Trial, guesser: Guesser, seed: int, report: Report) -> Played:
    """Draws against the model's own probabilities: of the first token, of the second, where a guess stands, of the third behind
    a right guess, where another stands, and of the fourth behind two."""
    prompt = np.random.default_rng(seed).integers(*PROMPT_TOKENS, 12).tolist()
    guesses: tuple[int, ...] = ()
    places = [_softmax(trial.logits([prompt])[0, -1])]
    weights = places[0]  # of the first tokens, where all guesses so far were right
    for _ in range(3):
        behind = _softmax(trial.logits([[*prompt, token, *guesses] for token in range(trial.vocab_size)])[:, -1])
        places.append(weights @ behind / weights.sum())
        if len(guesses) < 2:
            guesses += (int(places[-1].argmax()),)
            weights = weights * behind[:, guesses[-1]]
    seeds = [seed * NUM_DRAWS + number + 1 for number in range(NUM_DRAWS)]
    constant = Guesser(GUESSERS + "ConstantStrategy", {"tokens": guesses, "after": len(prompt) + 1})
    try:
        found = trial.generate([prompt] * NUM_DRAWS, len(places), guesser=constant, seeds=seeds)
    except SageError as error:
        report("runs", f"{constant.name}: {error}")
        return Played(0, {"runs"})
    right = [[each for each in found if each[1 : 1 + num] == guesses[:num]] for num in range(3)]
    samples = (
        ("first token", [each[0] for each in found], places[0]),
        ("token where a guess stood", [each[1] for each in found], places[1]),
        ("token behind a right guess", [each[2] for each in right[1]], places[2]),
        ("token behind two right guesses", [each[3] for each in right[2]], places[3]),
    )
    for what, draws, probabilities in samples:
        sigmas, num_classes = deviation(draws, probabilities)
        if sigmas > BROKEN_SIGMAS:
            report(
                "distribution",
                f"the {what}: {len(draws)} draws in {num_classes} classes are {sigmas:.1f} standard deviations from the "
                f"model's own distribution; {BROKEN_SIGMAS:g} are allowed.",
            )
    return Played(NUM_DRAWS, {"runs", "distribution"})


def _softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


ENGINE_SCENARIOS = {
    "greedy answers": Scenario(greedy),
    "answers in bfloat16": Scenario(near_argmax),
    "drawn tokens": Scenario(distribution),
}
