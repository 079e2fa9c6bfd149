"""Guesses from the request's own text: what followed the last place where its latest tokens stood."""

from collections.abc import Sequence

import numpy as np

from sagellm import _core
from sagellm.accel.speculative.base import Ask, SpeculativeStrategy, check_count
from sagellm.accel.speculative.reference import ReferenceNgramIndex

__all__ = ["NgramStrategy"]


class NgramStrategy(SpeculativeStrategy):
    """Looks for the longest n-gram, of `max_n` tokens down to `min_n`, that ends the text and stood in prompt or answer
    before; guesses what followed its latest place. Where that is so near that the text ends first, the guesses are read on
    themselves, so a text that repeats is guessed at full length.

    A step costs a look into a hash table for each n, whatever the text's length. Memory: up to 8 + 16 * (max_n - min_n + 1)
    bytes a token of a running request; none of ended ones.

    Args:
        lookahead: see `SpeculativeStrategy`.
        min_n, max_n: 1 <= min_n <= max_n <= 32.
        reference: the plain Python twin in place of the native index.

    Raises:
        SpeculationError: an option out of range.

    Source: prompt lookup decoding (Saxena, 2023).
    """

    name = "ngram"
    joins = True

    def __init__(self, lookahead: int = 4, min_n: int = 1, max_n: int = 4, reference: bool = False) -> None:
        super().__init__(lookahead)
        self.min_n = check_count(self.name, "min_n", min_n, 1, 32)
        self.max_n = check_count(self.name, "max_n", max_n, self.min_n, 32)
        self._make = ReferenceNgramIndex if reference else _core.NgramIndex
        self._indices: dict[int, _core.NgramIndex | ReferenceNgramIndex] = {}

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._index(ask.request_id).propose(ask.tokens, ask.limit) for ask in asks]

    def begin(self, request_id: int, tokens: np.ndarray) -> None:
        self._index(request_id).follow(tokens)

    def accept(self, request_id: int, tokens: Sequence[int]) -> None:
        if request_id in self._indices:
            self._indices[request_id].append(tokens)

    def end(self, request_id: int) -> None:
        self._indices.pop(request_id, None)

    def _index(self, request_id: int) -> "_core.NgramIndex | ReferenceNgramIndex":
        """One that is new holds nothing, and takes over what it is asked about."""
        index = self._indices.get(request_id)
        if index is None:
            index = self._indices[request_id] = self._make(self.min_n, self.max_n)
        return index
