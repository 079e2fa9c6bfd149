"""Tensor-parallel workers that split a model which runs natively: this worker's part, and how they exchange numbers.

Each layer has two sums over the workers, of float32 numbers. The output layer, which LMDeploy gives whole to each worker, is
split as well: a worker computes a part of the logits, and all gather them. So every worker draws the same tokens by itself.
"""

import copy
import ctypes
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from lmdeploy.pytorch import distributed
from torch import nn

from sagellm import _core
from sagellm.engines.lmdeploy.cpu.packed import TILE, PackedWeight

__all__ = ["Ranks", "ranks_of"]


@dataclass(frozen=True)
class Ranks:
    """This worker among those that split a model.

    Attributes:
        group: LMDeploy's process group of the workers.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def part(self, outputs: int) -> int:
        """Return the outputs of a worker's part of an output layer; that of the last worker may be smaller."""
        return TILE * math.ceil(outputs / self.size / TILE)

    def head(self, whole: PackedWeight) -> PackedWeight:
        """Return this worker's part of a packed output layer. It lies in the same memory."""
        if self.size == 1:
            return whole
        first = self.rank * self.part(whole.outputs)
        outputs = min(self.part(whole.outputs), whole.outputs - first)
        tile = {**whole.matrix, "outputs": TILE}
        if "format" in whole.matrix:
            tile_bytes = _core.packed_levels_bytes(tile)
        else:
            tile_bytes = whole.kernels.packed_bytes(TILE, whole.inputs)
        own = copy.copy(whole)
        own.outputs = outputs
        own.matrix = {**whole.matrix, "outputs": outputs, "weight": whole.matrix["weight"] + first // TILE * tile_bytes}
        if whole.matrix["bias"]:
            own.matrix["bias"] += 4 * first
        return own

    def exchange(self) -> "_core.Exchange | None":
        """Return how a step exchanges numbers; None for one worker.

        Without Python where a backend over shared memory does the sums and nobody listens to each of them.
        """
        if self.size == 1:
            return None
        observer = getattr(sys.modules.get("lmdeploy.sage_comm"), "observer", None)  # patch 0006 may be there alone
        native = None if observer is None else observer.native_exchange()
        return _core.CallbackExchange(self._add_up, self._gather) if native is None else native

    def gather_logits(self, exchange: "_core.Exchange", own: torch.Tensor, outputs: int) -> torch.Tensor:
        """Return the logits [rows, outputs] of which each worker has a part, `own`: [rows, part]."""
        part = self.part(outputs)
        own = nn.functional.pad(own, (0, part - own.shape[1])).contiguous()
        whole = torch.empty(self.size, *own.shape)
        exchange.gather(own.data_ptr(), own.numel(), whole.data_ptr())
        return whole.transpose(0, 1).flatten(1)[:, :outputs].contiguous()

    def _add_up(self, address: int, count: int) -> None:
        distributed.all_reduce(_numbers(address, count), group=self.group)

    def _gather(self, own: int, count: int, whole: int) -> None:
        distributed.all_gather_into_tensor(_numbers(whole, self.size * count), _numbers(own, count), group=self.group)


def _numbers(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


def ranks_of(model: nn.Module) -> tuple[Ranks, str]:
    """Return the workers that split a model of LMDeploy, and why they cannot run it natively; empty if they can."""
    context = distributed.get_dist_manager().current_context()
    config = context.dist_config
    if config is None or config.world_size == 1:
        return Ranks(), ""
    sizes = {config.attn_tp, config.mlp_tp, config.moe_tp, config.world_size}
    if len(sizes) > 1 or config.dp > 1 or config.ep > 1:
        return Ranks(), "its layers are split over different groups of workers"
    ranks = Ranks(context.attn_tp_group.rank, config.world_size, context.attn_tp_group.gpu_group)
    outputs = model.lm_head.out_features
    if ranks.part(outputs) * (ranks.size - 1) >= outputs:
        return ranks, f"its vocabulary of {outputs} is too small for {ranks.size} workers"
    return ranks, ""
