"""Guesses among tensor-parallel workers: worker 0 asks the strategy, and tells the others before a step."""

from collections.abc import Sequence
from typing import Any

import torch
from lmdeploy.pytorch import distributed

__all__ = ["Sharing"]

NONE = -1


class Sharing:
    """One worker's end. Each `tell` of worker 0 is heard by all others.

    Args:
        context: LMDeploy's `DistContext`.
    """

    def __init__(self, context: Any) -> None:
        self.rank = context.rank
        group = context.attn_tp_group
        self._group = group.gpu_group if group.gpu_group.name() == "gloo" else group.cpu_group

    def tell(self, lists: Sequence[Sequence[int]] | None) -> None:
        """Send lists of numbers, or None."""
        flat = [] if lists is None else [number for each in lists for number in (len(each), *each)]
        self._broadcast(torch.tensor([NONE if lists is None else len(flat)]))
        if flat:
            self._broadcast(torch.tensor(flat))

    def hear(self) -> list[list[int]] | None:
        """Receive what worker 0 tells."""
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        if size[0] == NONE:
            return None
        flat = self._broadcast(torch.zeros(size[0], dtype=torch.int64)) if size[0] else []
        lists, at = [], 0
        while at < len(flat):
            end = at + 1 + flat[at]
            lists.append(flat[at + 1 : end])
            at = end
        return lists

    def _broadcast(self, numbers: torch.Tensor) -> list[int]:
        source = torch.distributed.get_global_rank(self._group, 0)
        distributed.dist.broadcast(numbers, source, group=self._group)
        return numbers.tolist()
