"""Strategies that put an engine's checking to the test, as no useful one does."""

import random
from collections.abc import Sequence

import numpy as np

from sagellm.accel.speculative.base import Ask, SpeculativeStrategy, StepOutcome
from sagellm.accel.speculative.halves import EXACT, Verifier, load_half
from sagellm.accel.speculative.tree import Draft, DraftTree

__all__ = ["ConstantStrategy", "PartlyRightStrategy", "PartlyRightTreeStrategy", "PausingStrategy"]


class PartlyRightStrategy(SpeculativeStrategy):
    """Knows the right answers, and errs at random places: so every number of right guesses occurs.

    Args:
        texts: prompts with their right answers.
        wrong: the share of guesses that are another token, one that the model thinks likely there.
        likely: for each text and place, the tokens that come into question for an error.
        verifier: of the strategy that is checked, as module:Class; None: the exact one.
    """

    name = "partly_right"

    def __init__(
        self, texts: Sequence[Sequence[int]], likely: Sequence[Sequence[int]], lookahead: int = 4, wrong: float = 0.3,
        seed: int = 0, verifier: str | Verifier | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lookahead)
        self.verifier = EXACT if verifier is None else load_half(verifier, Verifier)
        self._texts, self._likely = [tuple(text) for text in texts], likely
        self._wrong, self._draw = wrong, random.Random(seed)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._one(ask) for ask in asks]

    def _one(self, ask: Ask) -> Draft:
        size, known = len(ask.tokens), tuple(ask.tokens.tolist())
        for text, likely in zip(self._texts, self._likely, strict=True):
            if text[:size] == known:
                places = range(size, min(size + self._draw.randint(0, ask.limit), len(text)))
                return [likely[place] if self._draw.random() < self._wrong else text[place] for place in places]
        return []


class PartlyRightTreeStrategy(PartlyRightStrategy):
    """Trees of what it knows and of errors: a right guess may stand before or behind wrong ones."""

    name = "partly_right_tree"

    def _one(self, ask: Ask) -> Draft:
        size, known = len(ask.tokens), tuple(ask.tokens.tolist())
        for text, likely in zip(self._texts, self._likely, strict=True):
            if text[:size] == known and len(text) > size:
                return self._tree(text[size:], likely[size:], self._draw.randint(1, ask.limit))
        return []

    def _tree(self, right: Sequence[int], likely: Sequence[int], num: int) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        places: list[int] = []
        for _ in range(num):
            parent = self._draw.randrange(max(-1, len(tokens) - 5), len(tokens))
            place = places[parent] + 1 if parent >= 0 else 0
            if place >= len(right):
                continue
            wanted = likely[place] if self._draw.random() < self._wrong else right[place]
            siblings = [token for token, other in zip(tokens, parents, strict=True) if other == parent]
            while wanted in siblings:
                wanted = self._draw.randrange(10, 250)
            tokens.append(wanted)
            parents.append(parent)
            places.append(place)
        return DraftTree(tokens, parents)


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

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        if self.quiet:
            raise RuntimeError(f"it was asked with {self.quiet} quiet steps to go")
        for ask in asks:
            if ask.tokens.tolist() != self._known[ask.request_id]:
                raise RuntimeError("it was asked about another text than it was told of")
            if self._loose[ask.request_id] > 1:
                raise RuntimeError("it was not told of a step")
            if not any(text[: len(ask.tokens)] == tuple(ask.tokens.tolist()) for text in self._texts):
                raise RuntimeError("it was asked about a text that no request has decoded")
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
