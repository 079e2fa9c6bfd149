"""Lookups of all contestants: long shared prefixes, short tails of their own. Needs NumPy alone.

A sequence is system prompt + document + tail. There are 64 system prompts with 8 documents each, 512 *pairs*. Lengths in
tokens have triangular distributions (least, most likely, greatest) and are taken at evenly spaced quantiles, then shuffled,
so that their means do not depend on the seed:

- system prompt: 512, 800, 2,048; mean 1,120; 64 of them.

- document: 480, 480, 5,700; mean 2,220; 512 of them.

- tail: 32, 48, 336; mean 139; one a sequence.

So a sequence has 1,024 to 8,084 tokens and 3,479 in the mean, of which a lookup finds 96%: its tail is new. The pairs
are equally frequent, in random order. Token ids are uniform below 131,072. No two system prompts, documents or tails begin
with the same token, lookups included, so the length of every match is known.

Blocks. As in an engine, which looks up before it inserts, a sequence comes with the ids of the blocks that hold it: cached
ones for what is cached already, fresh and dense ones for the rest.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 1 << 17
NUM_SYSTEMS, DOCUMENTS_EACH = 64, 8
NUM_PAIRS = NUM_SYSTEMS * DOCUMENTS_EACH
SYSTEM, DOCUMENT, TAIL = (512, 800, 2048), (480, 480, 5700), (32, 48, 336)
MAX_TOKENS = SYSTEM[2] + DOCUMENT[2] + TAIL[2]


class Sequence(NamedTuple):
    """`tokens`: int32 [n], contiguous. `block_ids`: int32 [n // block_size]. The first `num_cached` blocks are cached
    when the sequence is inserted."""

    tokens: NDArray[np.int32]
    block_ids: NDArray[np.int32]
    num_cached: int


class PrefixWorkload:
    """Deterministic in its arguments. Holds the shared parts; sequences and lookups are made when they are asked for.

    Attributes:
        systems, documents: the shared texts; document i follows system prompt i // DOCUMENTS_EACH.
        num_tokens: of all inserted sequences together.
        num_blocks, num_cached_tokens: what an index holds after all insertions, full blocks only.
    """

    def __init__(self, seed: int, block_size: int, num_sequences: int, num_lookups: int) -> None:
        """Raises ValueError for more tails than there are tokens to tell them apart, or blocks longer than a system prompt."""
        if num_sequences + num_lookups > VOCABULARY:
            raise ValueError(f"{num_sequences} sequences and {num_lookups} lookups; together at most {VOCABULARY}")
        if not 0 < block_size <= SYSTEM[0]:
            raise ValueError(f"block_size is {block_size}; allowed are 1 to {SYSTEM[0]}")
        self.block_size, self.num_sequences, self.num_lookups = block_size, num_sequences, num_lookups
        random = np.random.default_rng([seed, 0])
        self._seed = seed
        self.systems = _texts(random, NUM_SYSTEMS, SYSTEM)
        self.documents = _texts(random, NUM_PAIRS, DOCUMENT)
        self._first = random.permutation(VOCABULARY)  # tokens of the tails
        self._pairs = _in_turn(random, np.arange(NUM_PAIRS), num_sequences)
        self._lookup_pairs = _in_turn(random, np.unique(self._pairs), num_lookups)
        self._tail_lengths = lengths(random, num_sequences, TAIL)
        self._lookup_tail_lengths = lengths(random, num_lookups, TAIL)
        self._place_blocks()

    def _place_blocks(self) -> None:
        """The blocks of each pair, and where those of each sequence's own begin."""
        size = self.block_size
        system_tokens = np.array([len(text) for text in self.systems]).repeat(DOCUMENTS_EACH)
        shared_tokens = system_tokens + np.array([len(text) for text in self.documents])
        self._shared_blocks = shared_tokens // size
        totals = shared_tokens[self._pairs] + self._tail_lengths
        self.num_tokens = int(totals.sum())
        self._pair_ids: dict[int, NDArray[np.int32]] = {}
        system_ids: dict[int, NDArray[np.int32]] = {}
        self._num_cached, self._own_start = np.zeros((2, self.num_sequences), np.int64)
        used = 0
        for number, pair in enumerate(self._pairs):
            system = pair // DOCUMENTS_EACH
            known = self._pair_ids.get(pair, system_ids.get(system, np.empty(0, np.int32)))
            self._num_cached[number] = len(known)
            if pair not in self._pair_ids:
                fresh = np.arange(used, used + self._shared_blocks[pair] - len(known), dtype=np.int32)
                used += len(fresh)
                self._pair_ids[pair] = np.concatenate([known, fresh])
                system_ids[system] = self._pair_ids[pair][: len(self.systems[system]) // size]
            self._own_start[number] = used
            used += totals[number] // size - self._shared_blocks[pair]
        self.num_blocks = int(used)
        self.num_cached_tokens = self.num_blocks * size

    def sequence(self, number: int) -> Sequence:
        """The sequence inserted as number `number`, of `num_sequences`."""
        pair, start = self.pair(number), self._own_start[number]
        tokens = self._text(pair, self.tail(number))
        num_own = len(tokens) // self.block_size - self._shared_blocks[pair]
        own = np.arange(start, start + num_own, dtype=np.int32)
        return Sequence(tokens, np.concatenate([self._pair_ids[pair], own]), int(self._num_cached[number]))

    def sequences(self, start: int = 0, stop: int | None = None) -> Iterator[Sequence]:
        for number in range(start, self.num_sequences if stop is None else stop):
            yield self.sequence(number)

    def pair(self, number: int) -> int:
        """Which document a sequence begins with; `systems[pair // DOCUMENTS_EACH]` is before it."""
        return int(self._pairs[number])

    def tail(self, number: int) -> NDArray[np.int32]:
        return self._tail(number, self._tail_lengths[number])

    def lookup(self, number: int) -> NDArray[np.int32]:
        """int32 tokens of lookup `number`, of `num_lookups`."""
        return self._text(self.lookup_pair(number), self.lookup_tail(number))

    def lookup_pair(self, number: int) -> int:
        return int(self._lookup_pairs[number])

    def lookup_tail(self, number: int) -> NDArray[np.int32]:
        return self._tail(self.num_sequences + number, self._lookup_tail_lengths[number])

    def matched_tokens(self, number: int) -> int:
        """Return the tokens that lookup `number` finds once everything is inserted: system prompt and document, in full
        blocks."""
        return int(self._shared_blocks[self.lookup_pair(number)]) * self.block_size

    def matched_blocks(self, number: int) -> NDArray[np.int32]:
        """The blocks that lookup `number` finds. int32 [matched_tokens / block_size]."""
        return self._pair_ids[self.lookup_pair(number)]

    def _text(self, pair: int, tail: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.concatenate([self.systems[pair // DOCUMENTS_EACH], self.documents[pair], tail])

    def _tail(self, number: int, length: int) -> NDArray[np.int32]:
        tail = np.random.default_rng([self._seed, 1, number]).integers(0, VOCABULARY, length, np.int32)
        tail[0] = self._first[number]
        return tail


def lengths(random: np.random.Generator, count: int, triangle: tuple[int, int, int]) -> NDArray[np.int64]:
    """`count` lengths at evenly spaced quantiles of a triangular distribution, shuffled; the ends of it are among them."""
    low, mode, high = triangle
    quantiles = np.linspace(0, 1, count) if count > 1 else np.array([0.5])
    split = (mode - low) / (high - low)
    rising = low + np.sqrt(quantiles * (high - low) * (mode - low))
    falling = high - np.sqrt((1 - quantiles) * (high - low) * (high - mode))
    return random.permutation(np.rint(np.where(quantiles < split, rising, falling)).astype(np.int64))


def _texts(random: np.random.Generator, count: int, triangle: tuple[int, int, int]) -> list[NDArray[np.int32]]:
    texts = [random.integers(0, VOCABULARY, size, np.int32) for size in lengths(random, count, triangle)]
    for text, first in zip(texts, random.choice(VOCABULARY, count, replace=False), strict=True):
        text[0] = first
    return texts


def _in_turn(random: np.random.Generator, values: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """`count` of the values, each as often as any other give or take one, shuffled."""
    repeats = math.ceil(count / len(values))
    return random.permutation(np.tile(random.permutation(values), repeats)[:count])
