"""Strategies that put an engine's checking to the test, as no useful one does."""

import random
from collections.abc import Sequence

import numpy as np

from sagellm.accel.speculative.base import Ask, SpeculativeStrategy, StepOutcome

__all__ = ["ConstantStrategy", "PartlyRightStrategy", "PausingStrategy"]


class PartlyRightStrategy(SpeculativeStrategy):
    """Knows the right answers, and errs at random places: so every number of right guesses occurs.

    Args:
        texts: prompts with their right answers.
        wrong: the share of guesses that are another token, one that the model thinks likely there.
        likely: for each text and place, the tokens that come into question for an error.
    """

    name = "partly_right"

    def __init__(
        self, texts: Sequence[Sequence[int]], likely: Sequence[Sequence[int]], lookahead: int = 4, wrong: float = 0.3,
        seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(lookahead)
        self._texts, self._likely = [tuple(text) for text in texts], likely
        self._wrong, self._draw = wrong, random.Random(seed)

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask) -> list[int]:
        size, known = len(ask.tokens), tuple(ask.tokens.tolist())
        for text, likely in zip(self._texts, self._likely, strict=True):
            if text[:size] == known:
                places = range(size, min(size + self._draw.randint(0, ask.limit), len(text)))
                return [likely[place] if self._draw.random() < self._wrong else text[place] for place in places]
        return []


class PausingStrategy(PartlyRightStrategy):
    """Guesses for a few steps and is quiet for a few. It raises if it is asked about an unknown or
    different text, or if a step is reported late."""

    name = "pausing"
    joins = True

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._most, self._left = self.lookahead, 1
        self._known: dict[int, list[int]] = {}
        self._loose: dict[int, int] = {}  # tokens that no step has given: the one of the prompt

    def begin(self, request_id: int, tokens: np.ndarray) -> None:
        self._known[request_id], self._loose[request_id] = tokens.tolist(), 0

    def accept(self, request_id: int, tokens: Sequence[int]) -> None:
        self._known[request_id] += tokens
        self._loose[request_id] += len(tokens)

    def end(self, request_id: int) -> None:
        self._known.pop(request_id, None)
        self._loose.pop(request_id, None)

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        if self.quiet:
            raise RuntimeError(f"it was asked with {self.quiet} quiet steps to go")
        for ask in asks:
            if ask.tokens.tolist() != self._known[ask.request_id]:
                raise RuntimeError("it was asked about another text than it was told of")
            if self._loose[ask.request_id] > 1:
                raise RuntimeError("it was not told of a step")
            if not any(text[: len(ask.tokens)] == tuple(ask.tokens.tolist()) for text in self._texts):
                raise RuntimeError("it was asked about a text that nobody has decoded")
        return super().propose(asks)

    def step_done(self, outcome: StepOutcome) -> None:
        if self.quiet and outcome.num_rows != len(outcome.verdicts):
            raise RuntimeError("guesses in a step of which it was not asked")
        for request, _, num_accepted in outcome.verdicts:
            if request in self._loose:
                self._loose[request] -= num_accepted + 1
        self._left -= 1
        if not self._left:
            self.lookahead = 0 if self.lookahead else self._most
            self._left = 1 if self.lookahead else self._draw.randint(2, 3)
        self.quiet = 0 if self.lookahead else self._left


class ConstantStrategy(SpeculativeStrategy):
    """The same guesses for all texts, as far as they are not behind them.

    Args:
        tokens: what it guesses.
        after: tokens of a text, prompt included, behind which they are to stand.
    """

    name = "constant"

    def __init__(self, tokens: Sequence[int], after: int, lookahead: int = 4) -> None:
        super().__init__(lookahead)
        self._tokens, self._after = list(tokens), after

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._tokens[len(ask.tokens) - self._after :][: ask.limit] for ask in asks]
