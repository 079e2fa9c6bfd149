"""Weights of few bits: levels, with a scale and an offset for each block of inputs."""

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np

__all__ = ["FLOAT8", "FLOAT8_SHIFT", "LEVELS4", "LEVELS5", "LEVELS6", "LEVELS8", "STEP", "Levels", "whole_block"]

LEVELS4, LEVELS5, LEVELS6, LEVELS8 = "levels4", "levels5", "levels6", "levels8"  # as the native code names them
FLOAT8 = "float8"
FLOAT8_SHIFT = 8  # floats of 8 bits count as so many powers of two less
STEP = 16  # a block of the native code has a multiple of so many inputs
BLOCKS = range(256, 0, -STEP)  # inputs that can share a scale in the native code


def whole_block(inputs: int, largest: int = BLOCKS[0]) -> int | None:
    """Return the largest block that the native code has and that divides a number of inputs; None if none does."""
    return next((size for size in BLOCKS if size <= largest and inputs % size == 0), None)


class Levels(NamedTuple):
    """A matrix whose weights are level * scale + offset.

    Attributes:
        values: int8 [outputs, inputs].
        scales, offsets: float16 [outputs, inputs / block].
        format: LEVELS4: values are 0 to 15. LEVELS5: 0 to 31, in blocks of whole 32s. LEVELS6: 0 to 63. LEVELS8: -128 to 127.
            FLOAT8: values are the bytes of floats (e4m3), which count as 2 ** FLOAT8_SHIFT times less, so that scales stay in
            the range of half precision.
        order: column i of `values` is that of input `order[i]`, int32 [inputs]; None: they are in order.
    """

    values: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray
    format: str
    order: np.ndarray | None = None

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def in_order(self, order: Callable[[np.ndarray], np.ndarray]) -> "Levels":
        """Return the matrix with its rows, axis 0, in another order."""
        values, scales, offsets = (np.ascontiguousarray(order(part)) for part in self[:3])
        return self._replace(values=values, scales=scales, offsets=offsets)

    def in_blocks(self) -> "Levels | None":
        """Return the matrix with blocks of a size that the native code has; None if its inputs are no whole ones."""
        block = whole_block(self.block)
        return None if block is None else self._with_block(block)

    def of_inputs(self, first: int, count: int) -> "Levels":
        """Return the matrix of `count` inputs from `first` on, multiples of `STEP`. Blocks that are cut become smaller."""
        block = gcd(self.block, first, count)
        cut = self._with_block(block)
        scales, offsets = (part[:, first // block : (first + count) // block] for part in (cut.scales, cut.offsets))
        return cut._replace(values=self.values[:, first : first + count], scales=scales, offsets=offsets)

    def _with_block(self, block: int) -> "Levels":
        scales, offsets = (np.repeat(part, self.block // block, axis=1) for part in (self.scales, self.offsets))
        is_small = self.format == LEVELS5 and block % 32
        return self._replace(scales=scales, offsets=offsets, format=LEVELS6 if is_small else self.format)

    @classmethod
    def rounded(cls, weight: np.ndarray, block: int = 32) -> "Levels | None":
        """Return the nearest levels of 8 bits to float32 [outputs, inputs], as ggml's Q8_0.

        Args:
            block: inputs that share a scale at most.

        None: the inputs are no whole blocks of 16.
        """
        outputs, inputs = weight.shape
        found = whole_block(inputs, block)
        if found is None:
            return None
        block = found
        blocks = weight.reshape(outputs, -1, block)
        scales = (np.abs(blocks).max(axis=2) / 127).astype(np.float16)
        by = np.divide(1, scales, where=scales > 0, out=np.zeros(scales.shape, np.float32), dtype=np.float32)
        values = np.rint(blocks * by[:, :, None]).clip(-127, 127).astype(np.int8)
        return cls(values.reshape(outputs, inputs), scales, np.zeros_like(scales), LEVELS8)

    @staticmethod
    def joined(parts: Sequence["Levels"]) -> "Levels":
        """Return the rows of several matrices one after the other, in what all of them can be stored in.

        Args:
            parts: whole levels, their inputs in order.
        """
        block = min(part.block for part in parts)
        parts = [part._with_block(block) for part in parts]
        scales, offsets = (np.concatenate([part[field] for part in parts]) for field in (1, 2))
        return Levels(np.concatenate([part.values for part in parts]), scales, offsets, max(part.format for part in parts))
