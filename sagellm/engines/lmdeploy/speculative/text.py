"""The tokens of one request as the model agent knows them."""

import numpy as np

__all__ = ["FAR", "Text"]

FAR = 1 << 60  # tokens: no answer is as long


class Text:
    """Grows in place.

    Attributes:
        size: tokens.
        may_guess: whether the strategy is asked about it.
        is_blamed: whether it did something wrong with it before.
        left: tokens that it may still get.
        floor: guesses end before that many further tokens; `FAR` where nothing stands in the way.
    """

    __slots__ = ("_buffer", "_late", "floor", "is_blamed", "left", "may_guess", "size")

    def __init__(self, tokens: np.ndarray, left: int = 0, floor: int = FAR) -> None:
        self._buffer = np.empty(len(tokens) + 256, np.int64)
        self._buffer[: len(tokens)] = tokens
        self._late: list[int] = []  # its latest tokens that were not read yet
        self.size = len(tokens)
        self.may_guess = self.is_blamed = False
        self.left, self.floor = left, floor

    @property
    def tokens(self) -> np.ndarray:
        """int64 [size], read-only."""
        if self._late:
            self._write()
        view = self._buffer[: self.size]
        view.flags.writeable = False
        return view

    def append(self, tokens: tuple[int, ...]) -> None:
        """Called in every step: a list appends in a tenth of an array's time."""
        count = len(tokens)
        self._late += tokens
        self.size += count
        self.left -= count
        self.floor -= count

    def _write(self) -> None:
        if self.size > len(self._buffer):
            grown = np.empty(2 * self.size, np.int64)
            known = self.size - len(self._late)
            grown[:known] = self._buffer[:known]
            self._buffer = grown
        self._buffer[self.size - len(self._late) : self.size] = self._late
        self._late.clear()
