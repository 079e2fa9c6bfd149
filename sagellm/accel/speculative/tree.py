"""Guesses in a tree: several continuations of a text, of which the model computes all in one step."""

from collections.abc import Iterator, Sequence
from operator import index

import numpy as np

from sagellm.core.errors import SpeculationError

__all__ = ["Draft", "DraftTree", "depths_of", "parents_of"]

MAX_NODES = 64  # as the largest lookahead


class DraftTree:
    """Guesses and their parents. It is a sequence of its tokens, in the order in which they are computed.

    Args:
        tokens: guesses, int64 [n], 1 to 64.
        parents: int64 [n], the number of the guess before each guess; -1: it follows the last token of the text. Parents come
            before their children.
        chances: float [n], the chance of each guess that it and those before it are right; by default unknown.

    Raises:
        SpeculationError: lengths that differ, too many guesses, or a guess before its parent.

    Source: names of the properties as in Medusa (Cai et al., 2024, arXiv 2401.10774).
    """

    __slots__ = ("chances", "depths", "parents", "tokens")

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], chances: Sequence[float] | None = None) -> None:
        try:
            self.tokens, self.parents = [index(each) for each in tokens], [index(each) for each in parents]
        except TypeError as error:
            raise SpeculationError(f"tokens and parents of a tree are whole numbers ({error}).") from None
        self.chances = None if chances is None else [float(each) for each in chances]
        size = len(self.tokens)
        if not size == len(self.parents) == len(self.parents if chances is None else self.chances):
            raise SpeculationError(f"a tree of {size} tokens and {len(self.parents)} parents; give one of each for a guess.")
        if not 1 <= size <= MAX_NODES:
            raise SpeculationError(f"a tree of {size} guesses; give 1 to {MAX_NODES}.")
        self.depths: list[int] = []
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise SpeculationError(f"guess {node} of a tree has parent {parent}; give -1 to {node - 1}.")
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftTree) and (self.tokens, self.parents) == (other.tokens, other.parents)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"DraftTree({self.tokens}, {self.parents})"

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def path(self, node: int) -> list[int]:
        """Return the numbers of the guesses up to `node`, from the first one on; none for -1."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def path_tokens(self, node: int) -> list[int]:
        return [self.tokens[each] for each in self.path(node)]

    @property
    def draft_tokens(self) -> np.ndarray:
        """int64 [n]."""
        return np.array(self.tokens, np.int64)

    @property
    def retrieve_indices(self) -> np.ndarray:
        """int64 [leaves, longest]: the path to each leaf, padded with -1."""
        parents = set(self.parents)
        paths = [self.path(node) for node in range(len(self)) if node not in parents]
        longest = max(map(len, paths))
        return np.array([[*path, *[-1] * (longest - len(path))] for path in paths], np.int64)

    @property
    def tree_mask(self) -> np.ndarray:
        """bool [n, n]: row i sees guess j, which is i itself or on the path to it."""
        mask = np.zeros((len(self), len(self)), bool)
        for node in range(len(self)):
            mask[node, self.path(node)] = True
        return mask

    @property
    def tree_position_ids(self) -> np.ndarray:
        """int64 [n]: guesses before each guess on its path."""
        return np.array(self.depths, np.int64)

    def best_chain(self) -> list[int]:
        """Return the tokens of the path with the highest sum of chances; without chances, of the first one of the longest."""
        chances = [1.0] * len(self) if self.chances is None else self.chances
        sums: list[float] = []
        for parent, chance in zip(self.parents, chances, strict=True):
            sums.append(chance + (sums[parent] if parent >= 0 else 0.0))
        return self.path_tokens(max(range(len(self)), key=lambda node: sums[node]))


Draft = Sequence[int] | DraftTree


def parents_of(draft: Draft) -> Sequence[int]:
    """Return the guess before each guess, -1 for none."""
    return draft.parents if isinstance(draft, DraftTree) else range(-1, len(draft) - 1)


def depths_of(draft: Draft) -> Sequence[int]:
    """Return the number of guesses before each guess on its path."""
    return draft.depths if isinstance(draft, DraftTree) else range(len(draft))
