"""Guesses from the request's own text: what followed the last place where its latest tokens stood."""

from collections.abc import Sequence

import numpy as np

from sagellm.accel.speculative.base import Ask, SpeculativeStrategy
from sagellm.core.errors import SpeculationError

__all__ = ["NgramStrategy"]


class NgramStrategy(SpeculativeStrategy):
    name = "ngram"

    def __init__(self, lookahead: int = 4, min_n: int = 1, max_n: int = 4) -> None:
        super().__init__(lookahead)
        if not 1 <= min_n <= max_n:
            raise SpeculationError(f"min_n is {min_n!r}, max_n {max_n!r}; give 1 <= min_n <= max_n.")
        self.min_n, self.max_n = min_n, max_n

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._one(ask.tokens, ask.limit) for ask in asks]

    def _one(self, tokens: np.ndarray, limit: int) -> list[int]:
        for n in range(min(self.max_n, len(tokens) - 1), self.min_n - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
            found = np.flatnonzero((windows == tokens[-n:]).all(1))
            if len(found):
                start = int(found[-1]) + n
                return tokens[start : start + limit].tolist()
        return []
