"""Strategies that put an engine's checking to the test, as no useful one does."""

import random
from collections.abc import Sequence

from sagellm.accel.speculative.base import Ask, SpeculativeStrategy

__all__ = ["ConstantStrategy", "PartlyRightStrategy"]


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


class ConstantStrategy(SpeculativeStrategy):
    """Always the same guess, once."""

    name = "constant"

    def __init__(self, token: int, lookahead: int = 1) -> None:
        super().__init__(lookahead)
        self._token = token

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [[self._token] for _ in asks]
