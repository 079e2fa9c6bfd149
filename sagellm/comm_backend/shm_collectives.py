"""Collectives over the shared staging of a group.

A tensor goes through the staging in chunks. In each a rank writes its part, meets the others, reads theirs. Sums of float32 and
bfloat16, and gatherings, are native (`../csrc/src/shm_collectives.cpp`); the others are torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch

from sagellm._core import ShmGroup
from sagellm.comm_backend.base import ReduceOp

__all__ = ["REDUCTIONS", "Collectives", "describe"]

REDUCTIONS: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}
SUMMED_NATIVELY = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # with sums in float32
LABEL_CHARACTERS = 80  # a native label has 111


@lru_cache(4096)
def describe(dtype: torch.dtype, shape: torch.Size) -> str:
    """Type and shape of a tensor, which must be alike on all ranks, as messages and errors carry them."""
    text = f"{str(dtype)[6:]} {list(shape)}"
    if len(text) <= LABEL_CHARACTERS:
        return text
    return f"{text[: LABEL_CHARACTERS - 20]}... #{hash(shape) & 0xFFFFFFFF:08x}"


class Collectives:
    """Those of one rank; one at a time."""

    def __init__(self, group: ShmGroup, rank: int, world_size: int) -> None:
        self._group, self._rank, self._world_size = group, rank, world_size
        self._staging = torch.from_numpy(group.staging()).view(world_size, 2, -1)

    @torch.inference_mode()  # as the caller may be in, whose tensors can be written in no other mode
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, label: str, deadline: float) -> None:
        """Each rank reduces a share of every chunk, in the order of the ranks, and all copy it: the same bits for all."""
        if op is ReduceOp.SUM and tensor.dtype in SUMMED_NATIVELY:
            self._group.add_up(tensor.data_ptr(), tensor.numel(), SUMMED_NATIVELY[tensor.dtype], label, deadline)
            return
        reduction = REDUCTIONS[op]
        for chunk in self._chunks(tensor.view(-1)):
            staged = [part[: chunk.nbytes].view(chunk.dtype) for part in self._next_half(deadline)]
            staged[self._rank].copy_(chunk)
            self._group.meet(label, deadline)
            ends = [len(chunk) * rank // self._world_size for rank in range(self._world_size + 1)]
            own = slice(ends[self._rank], ends[self._rank + 1])
            result = chunk[own]
            for other in staged[1:]:
                first = staged[0][own] if other is staged[1] else result
                reduction(first, other[own], out=result)
            staged[self._rank][own].copy_(result)
            self._group.meet(label, deadline)
            for rank, part in enumerate(staged):
                if rank != self._rank:
                    chunk[ends[rank] : ends[rank + 1]].copy_(part[ends[rank] : ends[rank + 1]])

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, label: str, deadline: float) -> None:
        self._group.gather(tensor.data_ptr(), tensor.nbytes, output.data_ptr(), label, deadline)

    @torch.inference_mode()
    def broadcast(self, tensor: torch.Tensor, src: int, label: str, deadline: float) -> None:
        for chunk in self._chunks(tensor.view(-1)):
            staged = self._next_half(deadline)[src][: chunk.nbytes].view(chunk.dtype)
            if self._rank == src:
                staged.copy_(chunk)
            self._group.meet(label, deadline)
            if self._rank != src:
                chunk.copy_(staged)

    def _chunks(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """At least one, which may be empty: a collective of nothing is a meeting all the same."""
        yield from flat.split(self._staging.shape[2] // flat.element_size())

    def _next_half(self, deadline: float) -> list[torch.Tensor]:
        """Views of the staging, bytes, one a rank."""
        return list(self._staging[:, self._group.next_half(deadline)])
