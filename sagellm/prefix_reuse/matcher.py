"""Hashes of prefixes, and the decision whether a prefix that a hash found really is the beginning of a query."""

import threading
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm import _core
from sagellm.prefix_reuse.arguments import block_size as checked_block_size
from sagellm.prefix_reuse.arguments import int32_array, integer
from sagellm.prefix_reuse.base import Int32Array, PrefixEntry

# Odd 64-bit constants of wyhash. The hash is a fixed part of what instances tell each other: never change them.
SALT = (0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3)
EMPTY_HASH = SALT[3]  # of the prefix without tokens
MASK_64 = 2**64 - 1


def fold(a: int, b: int) -> int:
    """The two halves of the 128-bit product of two 64-bit numbers, xored."""
    product = a * b
    return (product & MASK_64) ^ (product >> 64)


def block_hash(tokens: Sequence[int]) -> int:
    """64 bits of the tokens of one block, whatever comes before it."""
    padded = [*tokens, *[0] * (-len(tokens) % 4)]  # four tokens, two words, are folded at a time
    words = [low | high << 32 for low, high in zip(padded[::2], padded[1::2], strict=True)]
    state = SALT[0]
    for first, second in zip(words[::2], words[1::2], strict=True):
        state = fold(first ^ SALT[1], second ^ state)
    return fold(state ^ SALT[2], len(tokens) ^ SALT[1])


def extended_hash(prefix_hash: int, tokens: Sequence[int]) -> int:
    """Hash of a prefix and one more block."""
    return fold(prefix_hash ^ SALT[1], block_hash(tokens) ^ SALT[2])


def prefix_hashes(tokens: Sequence[int] | Int32Array, block_size: int) -> NDArray[np.uint64]:
    """uint64 [full blocks of `tokens`]: the hash of the prefix up to the end of each block.

    Equal in every process and on every machine. Not cryptographic: chosen tokens can collide.
    The plain twin of `_core.prefix_hashes`.

    Source: the multiply-and-fold of wyhash, https://github.com/wangyi-fudan/wyhash.
    """
    size = checked_block_size(block_size)
    values = int32_array(tokens, "tokens").tolist()
    state, hashes = EMPTY_HASH, []
    for start in range(0, len(values) - size + 1, size):
        state = extended_hash(state, values[start : start + size])
        hashes.append(state)
    return np.array(hashes, dtype=np.uint64)


class Verdict(str, Enum):
    """The result of comparing a query with a cached prefix."""

    SAME_TOKENS = "same tokens"
    SAME_HASH = "same hash"  # no tokens to compare: as sure as the hash has bits
    LENGTH = "length"  # the query is shorter than the prefix, or the stored tokens are not as many as the prefix has
    DIFFERENT = "different"
    COLLISION = "collision"  # equal hashes, different tokens

    @property
    def holds(self) -> bool:
        return self in (Verdict.SAME_TOKENS, Verdict.SAME_HASH)


class PrefixMatcher:
    """Compares queries with prefixes that were found by their hash, and counts what it saw. Thread-safe.

    `hash_bits`: how many low bits of a hash the index keeps.
    """

    def __init__(self, block_size: int = 16, hash_bits: int = 64) -> None:
        self.block_size = checked_block_size(block_size)
        self.hash_bits = integer(hash_bits, "hash_bits", 1, 64)
        self._counts: Counter[Verdict] = Counter()
        self._lock = threading.Lock()

    def verify(self, tokens: Any, entry: PrefixEntry, stored_tokens: Any = None) -> bool:
        """Whether `tokens` (int32 [n]) begin with the cached prefix `entry`.

        With `stored_tokens` (int32 [entry.token_length]), what the prefix was stored for, they are compared one by one;
        without, only length and hash are.
        """
        return self.judge(tokens, entry, stored_tokens).holds

    def judge(self, tokens: Any, entry: PrefixEntry, stored_tokens: Any = None) -> Verdict:
        """As `verify`, with the reason."""
        verdict = self._judge(int32_array(tokens, "tokens"), entry, stored_tokens)
        with self._lock:
            self._counts[verdict] += 1
        return verdict

    def _judge(self, tokens: Int32Array, entry: PrefixEntry, stored_tokens: Any) -> Verdict:
        query = tokens[: entry.token_length]
        if len(query) < entry.token_length:
            return Verdict.LENGTH
        if stored_tokens is None:
            return Verdict.SAME_HASH if self._same_hash(query, entry) else Verdict.DIFFERENT
        stored = int32_array(stored_tokens, "stored_tokens")
        if len(stored) != len(query):
            return Verdict.LENGTH
        if np.array_equal(stored, query):
            return Verdict.SAME_TOKENS
        return Verdict.COLLISION if self._same_hash(query, entry) else Verdict.DIFFERENT

    def _same_hash(self, query: Int32Array, entry: PrefixEntry) -> bool:
        hashes = _core.prefix_hashes(query, self.block_size)
        found = int(hashes[-1]) if len(hashes) else EMPTY_HASH
        return (found ^ entry.token_hash) & (2**self.hash_bits - 1) == 0

    @property
    def counts(self) -> dict[Verdict, int]:
        """How often each verdict was given."""
        with self._lock:
            return {verdict: self._counts[verdict] for verdict in Verdict}

    @property
    def collisions(self) -> int:
        return self.counts[Verdict.COLLISION]
