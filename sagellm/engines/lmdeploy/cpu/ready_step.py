"""A step of a model that is ready for the native code."""

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ReadyStep"]


@dataclass(slots=True)
class ReadyStep:
    """Numbers that a native step reads, and where they lie.

    Attributes:
        tokens, positions: int64 [rows].
        queries, lengths: int64 [sequences], new tokens, and tokens with them.
        tables: int64 [sequences, width], block numbers.
        tensors, wishes: as `CpuDecoder.run` takes them.
        kept: what addresses in `tensors` point to, beside the tensors above.
    """

    is_decoding: bool
    tokens: torch.Tensor
    positions: torch.Tensor
    queries: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    tensors: dict[str, Any]
    wishes: dict[str, Any] | None
    kept: tuple[Any, ...]

    def is_same_as(self, other: "ReadyStep", block_size: int) -> bool:
        """Whether both read and write the same slots, and draw the same tokens. Neither has guesses."""
        if self.wishes != other.wishes:
            return False
        for name in ("tokens", "positions", "queries", "lengths"):  # a few numbers: lists are faster than tensors
            if getattr(self, name).tolist() != getattr(other, name).tolist():
                return False
        ours, theirs = self.tables.tolist(), other.tables.tolist()
        for mine, yours, length in zip(ours, theirs, self.lengths.tolist(), strict=True):
            used = -(-length // block_size)  # blocks after them may have come since
            if mine[:used] != yours[:used]:
                return False
        return True
