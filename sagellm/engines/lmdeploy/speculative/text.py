"""The tokens of one request as the model agent knows them."""

import math

import numpy as np

__all__ = ["Text"]


class Text:
    """Grows in place.

    Attributes:
        may_guess: whether the strategy is asked about it.
        is_blamed: whether it did something wrong with it before.
        room: tokens that fit into its blocks behind the last one.
        left: tokens that it may still get.
        floor: guesses end before that many further tokens; infinity where nothing stands in the way.
        blocks: its KV blocks.
    """

    def __init__(self, tokens: np.ndarray) -> None:
        self._buffer = np.empty(len(tokens) + 256, np.int64)
        self._buffer[: len(tokens)] = tokens
        self.size = len(tokens)
        self.may_guess = self.is_blamed = False
        self.room = self.left = 0
        self.floor = math.inf
        self.blocks = np.empty(0, np.int64)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [size], read-only."""
        view = self._buffer[: self.size]
        view.flags.writeable = False
        return view

    def append(self, tokens: list[int]) -> None:
        end = self.size + len(tokens)
        if end > len(self._buffer):
            grown = np.empty(2 * end, np.int64)
            grown[: self.size] = self._buffer[: self.size]
            self._buffer = grown
        self._buffer[self.size : end] = tokens
        self.size = end
        self.room -= len(tokens)
        self.left -= len(tokens)
        self.floor -= len(tokens)
