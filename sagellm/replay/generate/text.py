"""Token sequences without tokens: what two of them share is known, and so are the keys of their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count


class KeyCounter:
    """Gives out new block keys."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.keys: Iterator[int] = count()


class Text:
    """`num_tokens` tokens of which the full blocks have `keys`, root first. Immutable: what grows is a copy that shares it.

    Two texts that grew from one share the blocks that were full by then. The last block of a prompt, partly filled, has a key
    of its own each time: another text may go on differently.
    """

    def __init__(self, counter: KeyCounter, keys: tuple[int, ...] = (), num_tokens: int = 0) -> None:
        self._counter = counter
        self.keys = keys
        self.num_tokens = num_tokens

    def grown(self, num_tokens: int) -> Text:
        """Return this text and `num_tokens` new tokens."""
        total = self.num_tokens + num_tokens
        num_new = total // self._counter.block_size - len(self.keys)
        return Text(self._counter, self.keys + tuple(next(self._counter.keys) for _ in range(num_new)), total)

    def cut(self, num_tokens: int) -> Text:
        """Its first `num_tokens` tokens."""
        return Text(self._counter, self.keys[: num_tokens // self._counter.block_size], num_tokens)

    def prompt_keys(self, num_tokens: int | None = None) -> list[int]:
        """Keys of the blocks of a prompt of its first `num_tokens` tokens, all by default; the last may be partly filled."""
        total = self.num_tokens if num_tokens is None else num_tokens
        num_full, rest = divmod(total, self._counter.block_size)
        return [*self.keys[:num_full], *([next(self._counter.keys)] if rest else [])]
