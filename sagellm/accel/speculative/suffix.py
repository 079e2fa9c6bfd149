"""Guesses from what followed the same words before, in the request itself and in answers to earlier ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sagellm import _core
from sagellm.accel.speculative.base import Ask, SpeculativeStrategy, check_count, check_number
from sagellm.accel.speculative.reference import ReferenceSuffixHistory, ReferenceSuffixIndex
from sagellm.accel.speculative.tree import Draft, DraftTree
from sagellm.core.errors import SpeculationError

__all__ = ["SuffixStrategy"]

MIN_PROBABILITY = {False: 0.2, True: 0.1}  # of the guesses of a list, and of a tree


class SuffixStrategy(SpeculativeStrategy):
    """Two suffix trees with counts: of the request's prompt and answer, and of the answers of requests that have ended.

    For each number m of last tokens that occur in a tree, it goes on with the token that followed most often; ties go to the
    latest. The estimated probability that the first k guesses are all right is m / (m + k) times the share of each token among
    its alternatives. So a long match is trusted further than a short one. Guesses end where the estimate falls below
    `min_probability`. The strategy takes the guesses with the highest sum of estimates over all m and both trees: the expected
    number of right guesses. Ties go to the longer match, then to the request itself. So the number of guesses adapts.

    A suffix of a running request is counted from when it differs from all before it, or has `max_depth` tokens. After
    the longest strings of the request's own tree the newest place is read on; after the end of its text, the guesses.

    With `tree` the guesses are the likeliest of all continuations, of all m and both trees, as a `DraftTree`. There the chance
    of a guess is that of the guess before it, times its share, times m / (m + 1). Where two m know a guess, the higher
    chance counts. Without a word on `tree`, an `Ask` may want either; a list is the default.

    Memory, measured on texts of 2 to 30,000 tokens: 50 to 180 bytes a token of a running request, 70 to 130 of the history.
    It stays under 200, since a token adds at most two nodes of 40 bytes. The history holds `max_tokens` tokens at most.

    Args:
        lookahead: see `SpeculativeStrategy`.
        max_depth: tokens of match and guesses that a tree knows, 2 to 128.
        min_probability: 0 to 1; by default 0.2, of trees 0.1.
        tree: guess trees of up to `lookahead` tokens, or lists; by default as asked.
        max_tokens: size of the history of answers, 0 to 2**28. The oldest are dropped first; the end of a longer
        answer is kept.
        reference: the plain Python twins in place of the native trees.

    Raises:
        SpeculationError: an option out of range.

    Source: after SuffixDecoding (Oliaro et al., 2024, arXiv 2411.04975). There, guesses are a tree and a match of m tokens
    allows a fixed multiple of m guesses.
    """

    name = "suffix"
    joins = True

    def __init__(
        self, lookahead: int = 8, max_depth: int = 32, min_probability: float | None = None, max_tokens: int = 100_000,
        reference: bool = False, tree: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__(lookahead)
        self.max_depth = check_count(self.name, "max_depth", max_depth, 2, 128)
        if not (tree is None or isinstance(tree, bool)):
            raise SpeculationError(f"tree is {tree!r}; give true or false, and the size of a tree as lookahead.")
        self.tree, self.takes_shape = bool(tree), tree is None
        if min_probability is not None:
            check_number(self.name, "min_probability", min_probability, 0, 1)
        self._least = {
            is_tree: default if min_probability is None else float(min_probability)
            for is_tree, default in MIN_PROBABILITY.items()
        }
        self.max_tokens = check_count(self.name, "max_tokens", max_tokens, 0, 2**28)
        self.min_probability = self._least[self.tree]
        self._make = ReferenceSuffixIndex if reference else _core.SuffixIndex
        self._history = (ReferenceSuffixHistory if reference else _core.SuffixHistory)(self.max_depth, self.max_tokens)
        self._indices: dict[int, _core.SuffixIndex | ReferenceSuffixIndex] = {}
        self._num_prompt: dict[int, int] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        proposals: list[Draft] = []
        for ask in asks:
            index = self._indices.get(ask.request_id)
            if index is None:
                self.begin(ask.request_id, ask.tokens)
                index = self._indices[ask.request_id]
            is_tree = bool(ask.tree) if self.takes_shape else self.tree
            given = ask.tokens, ask.limit, self._least[is_tree], self._history
            if not is_tree:
                proposals.append(index.propose(*given))
                continue
            found = index.propose_tree(*given)
            proposals.append(DraftTree(*found) if found[0] else [])
        return proposals

    def begin(self, request_id: int, tokens: np.ndarray) -> None:
        index = self._indices.get(request_id)
        if index is None:
            index = self._indices[request_id] = self._make(self.max_depth)
            self._num_prompt[request_id] = len(tokens)
        index.follow(tokens)

    def accept(self, request_id: int, tokens: Sequence[int]) -> None:
        if request_id in self._indices:
            self._indices[request_id].append(tokens)

    def end(self, request_id: int) -> None:
        index = self._indices.pop(request_id, None)
        if index is not None:
            start = self._num_prompt.pop(request_id)
            self._history.add(index.tokens(min(start, len(index))))

    def report(self) -> dict[str, Any]:
        """`history_tokens` of at most `max_tokens`; bytes of the native trees."""
        indices = self._indices.values()
        return {
            "history_tokens": len(self._history),
            "history_bytes": getattr(self._history, "num_bytes", 0),
            "running_bytes": sum(getattr(index, "num_bytes", 0) for index in indices),
        }
