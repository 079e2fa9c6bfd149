"""Tensor-parallel workers that split a model which runs natively: this worker's part, and how they exchange numbers.

Each layer has two sums over the workers, of float32 numbers. The output layer, which LMDeploy gives whole to each worker, is
split as well: a worker computes a part of the logits, and all gather them. So every worker draws the same tokens by itself.
"""

import copy
import ctypes
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lmdeploy.pytorch import distributed
from torch import nn

from sagellm import _core
from sagellm.core.collectives import GROUP, CommDecision, sort_bytes
from sagellm.engines.lmdeploy.cpu.packed import TILE, PackedWeight

__all__ = ["Exchanges", "LayerExchange", "Ranks", "ranks_of"]

MOST_KNOWN = 4096  # numbers of tokens in a step


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

    def gather_logits(self, exchange: _core.Exchange, own: torch.Tensor, outputs: int) -> torch.Tensor:
        """Return the logits [rows, outputs] of which each worker has a part, `own`: [rows, part]."""
        return self._gather(exchange, own, outputs, self.part(outputs))

    def gather_key_heads(self, exchange: _core.Exchange, own: torch.Tensor, replicas: int) -> torch.Tensor:
        """Return numbers of all key heads from those of each worker's, [rows, key heads, numbers] float32.

        Args:
            replicas: adjacent workers that have the same key head; their numbers are added up.
        """
        rows, heads, numbers = own.shape
        part = heads * numbers
        whole = self._gather(exchange, own.flatten(1), self.size * part, part).view(rows, -1, replicas, numbers)
        return whole.sum(2)

    def agree(self, exchange: _core.Exchange, fault: str) -> str:
        """Return a worker's own fault, or that of another one; empty if none has any."""
        failed = self._gather(exchange, torch.full((1, 1), float(bool(fault))), self.size, 1)
        return fault or ("it failed in another worker, whose log says why" if failed.any() else "")

    def _gather(self, exchange: _core.Exchange, own: torch.Tensor, columns: int, part: int) -> torch.Tensor:
        whole = torch.empty(len(own), columns)
        whole[:, self.rank * part : self.rank * part + own.shape[1]] = own
        exchange.gather(whole.data_ptr(), len(whole), columns, part)
        return whole


class LayerExchange(NamedTuple):
    """The exchange that adds up the parts of a layer, and how it does, as `CommDecision` has it."""

    exchange: _core.Exchange
    pieces: int
    fused: bool


class Exchanges:
    """How the native steps of a model exchange numbers with the other workers.

    Args:
        hidden: numbers of a token between two layers.
        logits: numbers of a token behind the output layer.
        has_halves: a layer of the model can be computed in two halves of the rows.
    """

    def __init__(self, ranks: Ranks, num_layers: int, hidden: int, logits: int, has_halves: bool) -> None:
        self._ranks, self._num_layers, self._hidden, self._logits = ranks, num_layers, hidden, logits
        self._has_halves = has_halves
        self._num_changes = 0
        self._by_backends: dict[tuple[str, str], _core.Exchange] = {}
        # By number of tokens and phase: in one piece; in two as well, unless a plug-in or a rule has decided about it.
        self._known: dict[tuple[int, str], dict[int, list[LayerExchange]]] = {}

    def of_step(self, num_tokens: int, phase: str) -> list[LayerExchange]:
        """Return who adds up the parts of each layer, and how. The last one gathers the logits, too."""
        ways = self._ways(num_tokens, phase)
        return ways[1] if len(ways) == 1 else ways[_observer().window.pieces(_sort(num_tokens, phase))]

    def note(self, num_tokens: int, phase: str, exchanges: list[LayerExchange], seconds: float, waited_s: float) -> None:
        """Take the time of a step that had the exchanges of `of_step`. All workers come here after the same steps."""
        if len(self._ways(num_tokens, phase)) == 1:
            return
        window, sort = _observer().window, _sort(num_tokens, phase)
        if window.is_open(sort):
            pieces = max(each.pieces for each in exchanges)
            window.note(sort, pieces, seconds / num_tokens, waited_s / num_tokens)

    def _ways(self, num_tokens: int, phase: str) -> dict[int, list[LayerExchange]]:
        observer = _observer()
        if observer is not None and observer.num_changes != self._num_changes:
            self._num_changes = observer.num_changes
            self._known.clear()
        key = num_tokens, phase
        found = self._known.get(key)
        if found is None:
            decisions, logits = [CommDecision(GROUP)] * self._num_layers, CommDecision(GROUP)
            if observer is not None:
                decisions = observer.of_layers(4 * num_tokens * self._hidden, self._num_layers, phase)
                logits = observer.of_logits(4 * num_tokens * self._ranks.part(self._logits), phase)
            gatherings = [*(each.backend for each in decisions[:-1]), logits.backend]
            is_open = observer is not None and self._has_halves and num_tokens > 1
            is_open = is_open and any(each.pieces is None for each in decisions)
            found = {
                pieces: [
                    LayerExchange(self._exchange(each.backend, gathering), each.pieces or pieces, each.fused)
                    for each, gathering in zip(decisions, gatherings, strict=True)
                ]
                for pieces in ((1, 2) if is_open else (1,))
            }
            if len(self._known) < MOST_KNOWN:
                self._known[key] = found
        return found

    def _exchange(self, sums: str, gatherings: str) -> _core.Exchange:
        """Return what adds up by one backend and gathers by another."""
        found = self._by_backends.get((sums, gatherings))
        if found is None:
            observer = _observer()
            found = observer.native_exchange(sums) if observer is not None and sums == gatherings else None
            found = self._by_backends[sums, gatherings] = found or self._by_callbacks(sums, gatherings)
        return found

    def _by_callbacks(self, sums: str, gatherings: str) -> _core.CallbackExchange:
        """Exchange by LMDeploy's functions, where plug-ins and the record see each collective."""
        group, rank, size = self._ranks.group, self._ranks.rank, self._ranks.size

        def using(backend: str) -> Any:
            observer = _observer()
            return nullcontext() if observer is None else observer.using(backend)

        def add_up(address: int, count: int) -> None:
            with using(sums):
                distributed.all_reduce(_numbers(address, count), group=group)

        def begin_sum(address: int, count: int) -> Any:
            with using(sums):
                return distributed.all_reduce(_numbers(address, count), group=group, async_op=True).wait

        def gather(address: int, rows: int, columns: int, part: int) -> None:
            whole = _numbers(address, rows * columns).view(rows, columns)
            own = nn.functional.pad(whole, (0, size * part - columns))[:, rank * part : (rank + 1) * part].contiguous()
            parts = own.new_empty(size, rows, part)
            with using(gatherings):
                distributed.all_gather(list(parts), own, group=group)
            whole.copy_(parts.transpose(0, 1).flatten(1)[:, :columns])

        return _core.CallbackExchange(add_up, begin_sum, gather)


def _sort(num_tokens: int, phase: str) -> tuple[str, int]:
    """Return steps that are alike. Sizes of prompts seldom come again, those of decode steps do."""
    return phase, num_tokens if phase == "decode" else sort_bytes(num_tokens)


def _observer() -> Any:
    """Return what sees the collectives of this process, or None. Patch 0006 may be there alone."""
    return getattr(sys.modules.get("lmdeploy.sage_comm"), "observer", None)


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
