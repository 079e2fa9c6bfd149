"""Quantized tensors of a GGUF file as they are: whole numbers, with a scale and an offset for each block.

The layouts of the blocks are those of ggml (`ggml-common.h`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sagellm.core.cached_folder import default_cache_dir
from sagellm.core.file_hashes import hash_files
from sagellm.models.base import ModelError
from sagellm.models.convert import StoredMatrix, read_conversion
from sagellm.models.gguf_weights import in_halves

__all__ = ["LEVEL_TYPES", "GGUFLevels", "Levels"]

BLOCK = 32  # weights of a block of most types


class Levels(NamedTuple):
    """A matrix whose weights are level * scale + offset.

    Attributes:
        values: int8 [outputs, inputs].
        scales, offsets: float16 [outputs, inputs / block].
        bits: 4 if the values are 0 to 15, else 8.
    """

    values: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray
    bits: int

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def in_order(self, order: Callable[[np.ndarray], np.ndarray]) -> "Levels":
        """Return the matrix with its rows, axis 0, in another order."""
        return Levels(*(np.ascontiguousarray(order(part)) for part in self[:3]), self.bits)

    @classmethod
    def rounded(cls, weight: np.ndarray) -> "Levels | None":
        """Return the nearest levels of 8 bits to float32 [outputs, inputs], as ggml's Q8_0.

        None: the inputs are no whole blocks of 16.
        """
        outputs, inputs = weight.shape
        block = next((size for size in (BLOCK, BLOCK // 2) if inputs % size == 0), None)
        if block is None:
            return None
        blocks = weight.reshape(outputs, -1, block)
        scales = (np.abs(blocks).max(axis=2) / 127).astype(np.float16)
        by = np.divide(1, scales, where=scales > 0, out=np.zeros(scales.shape, np.float32), dtype=np.float32)
        values = np.rint(blocks * by[:, :, None]).clip(-127, 127).astype(np.int8)
        return cls(values.reshape(outputs, inputs), scales, np.zeros_like(scales), 8)

    @staticmethod
    def joined(parts: Sequence["Levels"]) -> "Levels":
        """Return the rows of several matrices one after the other, in what all of them can be stored in."""
        block = min(part.block for part in parts)
        scales, offsets = (
            np.concatenate([np.repeat(part[field], part.block // block, axis=1) for part in parts]) for field in (1, 2)
        )
        return Levels(np.concatenate([part.values for part in parts]), scales, offsets, max(part.bits for part in parts))


class GGUFLevels:
    """The levels of the file that a folder was converted from.

    Args:
        folder: as `convert_gguf` returned it.

    Raises:
        ModelError: the folder was not converted from a GGUF file, or that file is gone or has changed.
    """

    def __init__(self, folder: Path) -> None:
        record = read_conversion(folder)
        if record is None:
            raise ModelError(f"{folder} was not converted from a GGUF file, so it has no packed weights; use weights auto.")
        try:
            (digest,) = hash_files([record.source], default_cache_dir())
        except OSError as error:
            raise ModelError(
                f"{record.source}, which packed weights are read from, cannot be read: {error.strerror}."
            ) from None
        if digest != record.sha256:
            raise ModelError(f"{record.source} has changed since it was converted; start with --model {record.source} again.")
        self._matrices = record.matrices
        self._data = np.memmap(record.source, np.uint8, "r")

    def __contains__(self, name: str) -> bool:
        return name in self._matrices

    def of(self, names: Sequence[str]) -> Levels | None:
        """Return the rows of these matrices, by their names in transformers; None if one is not quantized in blocks."""
        parts = [self._one(self._matrices[name]) for name in names]
        return Levels.joined(parts) if all(parts) else None

    def _one(self, matrix: StoredMatrix) -> Levels | None:
        kind = LEVEL_TYPES.get(matrix.kind)
        if kind is None:
            return None
        bytes_of_block, bits, read = kind
        data = self._data[matrix.offset : matrix.offset + matrix.num_bytes].reshape(-1, bytes_of_block)
        levels = Levels(*(np.ascontiguousarray(part).reshape(matrix.outputs, -1) for part in read(np.asarray(data))), bits)
        return levels.in_order(lambda part: in_halves(part, matrix.heads)) if matrix.heads else levels


Read = tuple[np.ndarray, np.ndarray, np.ndarray]  # values, scales, offsets of blocks, one a row


def _halves(data: np.ndarray, *places: int) -> list[np.ndarray]:
    """Half-precision numbers that begin at these bytes of each block, [blocks, 1] each."""
    return [np.ascontiguousarray(data[:, place : place + 2]).view(np.float16) for place in places]


def _nibbles(data: np.ndarray) -> np.ndarray:
    """First the low halves of all bytes, then the high ones."""
    return np.concatenate([data & 15, data >> 4], axis=1).view(np.int8)


def _fifth_bits(data: np.ndarray) -> np.ndarray:
    """Four bytes of bits as [blocks, 32], each worth 16."""
    return (np.unpackbits(data, axis=1, bitorder="little") << 4).view(np.int8)


def _q4_0(data: np.ndarray) -> Read:
    (scale,) = _halves(data, 0)
    return _nibbles(data[:, 2:]), scale, scale * np.float16(-8)


def _q4_1(data: np.ndarray) -> Read:
    return _nibbles(data[:, 4:]), *_halves(data, 0, 2)


def _q5_0(data: np.ndarray) -> Read:
    (scale,) = _halves(data, 0)
    return _nibbles(data[:, 6:]) | _fifth_bits(data[:, 2:6]), scale, scale * np.float16(-16)


def _q5_1(data: np.ndarray) -> Read:
    return _nibbles(data[:, 8:]) | _fifth_bits(data[:, 4:8]), *_halves(data, 0, 2)


def _q8_0(data: np.ndarray) -> Read:
    (scale,) = _halves(data, 0)
    return data[:, 2:].view(np.int8), scale, np.zeros_like(scale)


def _six_bits(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twelve bytes that hold eight scales and eight minima of six bits each."""
    low, high, rest = data[:, :4], data[:, 4:8], data[:, 8:]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=1)
    return scales, minima


def _k_scales(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of the eight blocks of a super-block. The product of two numbers is rounded to a half."""
    scale, minimum = (part.astype(np.float32) for part in _halves(data, 0, 2))
    scales, minima = _six_bits(data[:, 4:16])
    return (scale * scales).astype(np.float16), (-minimum * minima).astype(np.float16)


def _q4_k(data: np.ndarray) -> Read:
    values = data[:, 16:].reshape(-1, 4, 1, BLOCK) >> np.array([0, 4], np.uint8)[:, None] & 15
    return values.view(np.int8), *_k_scales(data)


def _q5_k(data: np.ndarray) -> Read:
    low = data[:, 48:].reshape(-1, 4, 1, BLOCK) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (low.reshape(-1, 8, BLOCK) | high << 4).view(np.int8), *_k_scales(data)


def _q6_k(data: np.ndarray) -> Read:
    low = data[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = data[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    values = (low.reshape(-1, 8, 32) | high.reshape(-1, 8, 32) << 4).view(np.int8) - np.int8(32)
    (scale,) = _halves(data, 208)
    scales = (scale.astype(np.float32) * data[:, 192:208].view(np.int8)).astype(np.float16)
    return values, scales, np.zeros_like(scales)


# Type: bytes of a block or super-block, bits of a level here, how to read it.
LEVEL_TYPES: dict[str, tuple[int, int, Callable[[np.ndarray], Read]]] = {
    "Q4_0": (18, 4, _q4_0), "Q4_1": (20, 4, _q4_1), "Q5_0": (22, 8, _q5_0), "Q5_1": (24, 8, _q5_1),
    "Q8_0": (34, 8, _q8_0), "Q4_K": (144, 4, _q4_k), "Q5_K": (176, 8, _q5_k), "Q6_K": (210, 8, _q6_k),
}  # fmt: skip
