"""The native indices in plain Python, by their definitions: slow, and what the tests hold the native ones to."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

__all__ = ["ReferenceNgramIndex", "ReferenceSuffixHistory", "ReferenceSuffixIndex"]


class _Text:
    """`text`: all tokens so far."""

    def __init__(self) -> None:
        self.text: list[int] = []

    def append(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.text.append(int(token))
            self._grown()

    def follow(self, tokens: Iterable[int]) -> None:
        """Hold these and nothing else."""
        wanted = [int(token) for token in tokens]
        if wanted[: len(self.text)] != self.text:
            self._clear()
        self.append(wanted[len(self.text) :])

    def tokens(self, start: int = 0) -> np.ndarray:
        return np.array(self.text[start:], np.int32)

    def __len__(self) -> int:
        return len(self.text)

    def _clear(self) -> None:
        self.text = []

    def _grown(self) -> None:
        pass


class ReferenceNgramIndex(_Text):
    def __init__(self, min_n: int, max_n: int) -> None:
        super().__init__()
        self._min_n, self._max_n = min_n, max_n

    def propose(self, tokens: Iterable[int], limit: int) -> list[int]:
        self.follow(tokens)
        size = len(self.text)
        for n in range(min(self._max_n, size), self._min_n - 1, -1):
            for place in range(size - 1, n - 1, -1):  # the latest first
                if self.text[place - n : place] == self.text[size - n :]:
                    virtual = self.text[place:]
                    while len(virtual) < limit:
                        virtual.append(virtual[len(virtual) - (size - place)])
                    return virtual[:limit]
        return []


class _Suffixes:
    """Suffixes of a text, each of a length of its own; looked up by their first token."""

    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.lengths: dict[int, int] = {}
        self._starts: defaultdict[int, list[int]] = defaultdict(list)

    def add(self, start: int, length: int) -> None:
        self.lengths[start] = length
        self._starts[self.text[start]].append(start)

    def beginning_with(self, pattern: list[int]) -> list[int]:
        """Their starts, in order."""
        length, text = len(pattern), self.text
        return [
            start for start in self._starts.get(pattern[0], ())
            if self.lengths[start] >= length and text[start : start + length] == pattern
        ]  # fmt: skip

    def guess(
        self, pattern: list[int], max_depth: int, is_growing: bool, limit: int, min_probability: float
    ) -> tuple[float, list[int]]:
        """Return the most frequent continuation, and how many of its guesses are expected to be right."""
        starts, matched = self.beginning_with(pattern), len(pattern)
        guesses: list[int] = []
        probability, score = 1.0, 0.0
        while starts and len(guesses) < limit:
            length = matched + len(guesses)
            total = 1 if length >= max_depth else len(starts)
            followers = self.followers(starts, length, max_depth, is_growing, guesses)
            if not followers:
                break
            token = max(followers, key=lambda token: (len(followers[token]), followers[token][-1]))
            probability *= len(followers[token]) / total
            estimate = probability * (matched / (matched + len(guesses) + 1))
            if estimate < min_probability:
                break
            starts = followers[token]
            guesses.append(token)
            score += estimate
        return score, guesses


    def followers(
        self, starts: list[int], length: int, max_depth: int, is_growing: bool, path: list[int]
    ) -> dict[int, list[int]]:
        """By token, the starts of suffixes that go on with it behind `length` tokens. `path`: guesses behind the text."""
        if length >= max_depth:
            starts = starts[-1:] if is_growing else []
        found: dict[int, list[int]] = defaultdict(list)
        for start in starts:
            if is_growing or self.lengths[start] > length:
                place = start + length
                found[self.text[place] if place < len(self.text) else path[place - len(self.text)]].append(start)
        return found


class ReferenceSuffixHistory:
    def __init__(self, max_depth: int, max_tokens: int) -> None:
        self.max_depth, self._max_tokens = max_depth, max_tokens
        self._texts: list[list[int]] = []
        self.suffixes = _Suffixes([])

    def add(self, tokens: Iterable[int]) -> None:
        new = [int(token) for token in tokens]
        new = new[max(0, len(new) - self._max_tokens) :]
        while len(self) + len(new) > self._max_tokens:
            self._texts.pop(0)
        self._texts += [new] if new else []
        self.suffixes = _Suffixes([token for text in self._texts for token in text])
        end = 0
        for text in self._texts:
            start, end = end, end + len(text)
            for place in range(start, end):
                self.suffixes.add(place, min(self.max_depth, end - place))

    def __len__(self) -> int:
        return sum(map(len, self._texts))


class ReferenceSuffixIndex(_Text):
    def __init__(self, max_depth: int) -> None:
        super().__init__()
        self._max_depth = max_depth
        self._clear()

    def _clear(self) -> None:
        super()._clear()
        self._suffixes, self._next = _Suffixes(self.text), 0

    def _grown(self) -> None:
        while self._next < len(self.text):
            rest = self.text[self._next :]
            if len(rest) < self._max_depth and self._suffixes.beginning_with(rest):
                return
            self._suffixes.add(self._next, self._max_depth)
            self._next += 1

    def propose(
        self, tokens: Iterable[int], limit: int, min_probability: float, history: ReferenceSuffixHistory | None = None
    ) -> list[int]:
        self.follow(tokens)
        best: tuple[float, list[int]] = (0.0, [])
        sources = [(self._suffixes, self._max_depth, True)]
        if history is not None:
            sources.append((history.suffixes, history.max_depth, False))
        for suffixes, max_depth, is_growing in sources:
            own = self._longest(max_depth, is_growing)
            for matched in range(own, 0, -1):
                pattern = self.text[-matched:]
                found = suffixes.guess(pattern, max_depth, is_growing, limit, min_probability)
                if found[0] > best[0]:
                    best = found
        return best[1]

    def _longest(self, max_depth: int, is_growing: bool) -> int:
        return len(self.text) - self._next if is_growing else min(max_depth, len(self.text))

    def propose_tree(
        self, tokens: Iterable[int], limit: int, min_probability: float, history: ReferenceSuffixHistory | None = None
    ) -> tuple[list[int], list[int], list[float]]:
        self.follow(tokens)
        sources = [(self._suffixes, self._max_depth, True)]
        if history is not None:
            sources.append((history.suffixes, history.max_depth, False))
        # Chance, match, whether it is of the running text, newest place; then its path, and the starts that go on like this.
        open_branches: list[tuple[float, int, bool, int, tuple[int, ...], list[int]]] = []

        def expand(chance: float, matched: int, is_growing: bool, path: tuple[int, ...], starts: list[int]) -> None:
            suffixes, max_depth, _ = sources[0 if is_growing else 1]
            length = matched + len(path)
            followers = suffixes.followers(starts, length, max_depth, is_growing, list(path))
            total = 1 if length >= max_depth else len(starts)
            for token, those in followers.items():
                found = chance * (len(those) / total) * (matched / (matched + 1))
                if found >= min_probability:
                    open_branches.append((found, matched, is_growing, those[-1], (*path, token), those))

        for number, (suffixes, max_depth, is_growing) in enumerate(sources):
            count = 0
            for matched in range(self._longest(max_depth, number == 0), 0, -1):
                starts = suffixes.beginning_with(self.text[-matched:])
                if len(starts) != count:
                    count = len(starts)
                    expand(1.0, matched, is_growing, (), starts)
        chances: dict[tuple[int, ...], float] = {}
        while open_branches and len(chances) < limit:
            branch = max(open_branches, key=lambda each: each[:4])
            open_branches.remove(branch)
            chance, matched, is_growing, _, path, starts = branch
            chances.setdefault(path, chance)
            expand(chance, matched, is_growing, path, starts)
        paths = list(chances)
        parents = [paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths]
        return [path[-1] for path in paths], parents, list(chances.values())
