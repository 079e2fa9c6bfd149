"""Quantized tensors of a GGUF file as they are: whole numbers, with a scale and an offset for each block.

The layouts of the blocks are those of ggml (`ggml-common.h`).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.core.cached_folder import default_cache_dir
from sagellm.core.file_hashes import hash_files
from sagellm.models.base import ModelError
from sagellm.models.convert import StoredMatrix, read_conversion
from sagellm.models.gguf_weights import in_halves, tensor_shape
from sagellm.models.levels import LEVELS4, LEVELS5, LEVELS6, LEVELS8, STEP, Levels

__all__ = ["LEVEL_TYPES", "GGUFLevels"]

BLOCK = 32  # weights of a block of most types
SPLIT_BY_INPUTS = {"attn_output": "o_proj", "ffn_down": "down_proj"}  # names in GGUF and in transformers


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

    def check_split(self, config: Mapping[str, Any], workers: int) -> None:
        """Check that workers can share the inputs of each quantized matrix that they split by inputs.

        Args:
            config: content of config.json.

        Raises:
            ModelError: a worker's inputs would be no whole blocks.
        """
        for ours, theirs in SPLIT_BY_INPUTS.items():
            inputs = tensor_shape(ours, config)[1]
            found = [name for name, each in self._matrices.items() if name.endswith(theirs) and each.kind in LEVEL_TYPES]
            if found and inputs % (workers * STEP):
                fitting = [each for each in range(1, inputs // STEP + 1) if inputs % (each * STEP) == 0]
                raise ModelError(
                    f"weights packed with tensor_parallel {workers}: {found[0]} has {inputs} inputs, and each worker needs a "
                    f"multiple of {STEP} of them. It can be split for {', '.join(map(str, fitting[:8]))} workers; or use "
                    "weights auto."
                )

    def of(self, names: Sequence[str]) -> Levels | None:
        """Return the rows of these matrices, by their names in transformers; None if one is not quantized in blocks."""
        parts = [self._one(self._matrices[name]) for name in names]
        return Levels.joined(parts) if all(parts) else None

    def _one(self, matrix: StoredMatrix) -> Levels | None:
        kind = LEVEL_TYPES.get(matrix.kind)
        if kind is None:
            return None
        bytes_of_block, form, read = kind
        data = self._data[matrix.offset : matrix.offset + matrix.num_bytes].reshape(-1, bytes_of_block)
        levels = Levels(*(np.ascontiguousarray(part).reshape(matrix.outputs, -1) for part in read(np.asarray(data))), form)
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
    values = (low.reshape(-1, 8, 32) | high.reshape(-1, 8, 32) << 4).view(np.int8)
    (scale,) = _halves(data, 208)
    scales = (scale.astype(np.float32) * data[:, 192:208].view(np.int8)).astype(np.float16)
    return values, scales, scales * np.float16(-32)


# Type: bytes of a block or super-block, format of the levels here, how to read it.
LEVEL_TYPES: dict[str, tuple[int, str, Callable[[np.ndarray], Read]]] = {
    "Q4_0": (18, LEVELS4, _q4_0), "Q4_1": (20, LEVELS4, _q4_1), "Q4_K": (144, LEVELS4, _q4_k),
    "Q5_0": (22, LEVELS5, _q5_0), "Q5_1": (24, LEVELS5, _q5_1), "Q5_K": (176, LEVELS5, _q5_k),
    "Q6_K": (210, LEVELS6, _q6_k), "Q8_0": (34, LEVELS8, _q8_0),
}  # fmt: skip
