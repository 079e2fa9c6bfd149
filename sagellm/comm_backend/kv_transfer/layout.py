"""Layout of the bytes of a worker's KV blocks, as peers get it."""

import math
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    import torch

__all__ = ["KVLayout", "KVPart", "KVRegion"]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KVPart(Model):
    """One tensor [layers, blocks, block_size, heads, width], contiguous: the keys, the values, or the scales of quantized ones.

    Attributes:
        num_heads: on this rank.
        dtype: as torch names it, without "torch.".
        group: so many adjacent tokens of a block share their bytes, and move together.
    """

    name: str = Field(min_length=1)
    num_heads: int = Field(ge=1)
    width: int = Field(ge=1)
    dtype: str
    group: int = Field(default=1, ge=1)


class KVLayout(Model):
    """The KV blocks of one rank. `total_heads`: KV heads of the model, of which a rank holds `part.num_heads`, those from
    `first_head` on; ranks may hold the same ones, where there are more ranks than heads."""

    num_layers: int = Field(ge=1)
    num_blocks: int = Field(ge=1)
    block_size: int = Field(ge=1)  # tokens
    total_heads: int = Field(ge=1)
    first_head: int = Field(default=0, ge=0)
    tp_rank: int = Field(default=0, ge=0)
    tp_size: int = Field(default=1, ge=1)
    parts: tuple[KVPart, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> "KVLayout":
        import torch  # not before there is a layout: who passes on what engines say of themselves does without

        if self.tp_rank >= self.tp_size:
            raise ValueError(f"tp_rank is {self.tp_rank} of {self.tp_size}; ranks go from 0 to {self.tp_size - 1}.")
        for part in self.parts:
            if self.first_head + part.num_heads > self.total_heads:
                raise ValueError(
                    f"{part.name} has heads {self.first_head} to {self.first_head + part.num_heads}, the model has "
                    f"{self.total_heads}."
                )
            if self.block_size % part.group:
                raise ValueError(f"{part.name} has groups of {part.group} tokens, and blocks of {self.block_size}.")
            if not isinstance(getattr(torch, part.dtype, None), torch.dtype):
                raise ValueError(f"{part.name}: dtype is {part.dtype!r}, which torch does not know.")
        return self

    def shape(self, part: KVPart) -> tuple[int, int, int, int, int]:
        return (self.num_layers, self.num_blocks, self.block_size, part.num_heads, part.width)

    def num_bytes(self, part: KVPart) -> int:
        """Shape of the whole tensor."""
        import torch

        return math.prod(self.shape(part)) * getattr(torch, part.dtype).itemsize

    def token_bytes(self) -> int:
        """Bytes of a token's keys and values, all layers, on this rank."""
        return sum(self.num_bytes(part) for part in self.parts) // (self.num_blocks * self.block_size)


class KVRegion:
    """The KV blocks of this worker: a layout and its tensors, in the order of its parts.

    Raises:
        ValueError: a tensor that is not what the layout says.
    """

    def __init__(self, layout: KVLayout, tensors: "tuple[torch.Tensor, ...]") -> None:
        self.layout, self.tensors = layout, tensors
        for part, tensor in zip(layout.parts, tensors, strict=True):
            if tuple(tensor.shape) != layout.shape(part) or str(tensor.dtype) != f"torch.{part.dtype}":
                raise ValueError(
                    f"{part.name} is {tuple(tensor.shape)} {tensor.dtype}; the layout says {layout.shape(part)} {part.dtype}."
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{part.name} has strides {tensor.stride()}; KV blocks are contiguous.")
