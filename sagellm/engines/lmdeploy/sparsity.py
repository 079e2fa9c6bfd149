"""Sparse attention in LMDeploy's steps: where a policy is asked, and how its choice reaches the attention.

A policy that chooses once a step works on every device: the step gets a shorter block table. The tokens of the other blocks
count as `num_ignored_history`, which LMDeploy subtracts from the keys that attention reads, and not from positions. The last
block stays the last, so the new token goes where it would go. Choices for each layer are made in the CPU device's native step.
"""

import ctypes
import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sagellm.accel.sparsity.base import SparsePolicy, SparseView, TopBlocks, wrong_with
from sagellm.core.config import HookConfig
from sagellm.core.errors import SparsityError

__all__ = ["SparseSteps", "reading", "steps_of"]

logger = logging.getLogger(__name__)


def steps_of(cache_config: Any) -> "SparseSteps | None":
    """Return what chooses the blocks of an engine's steps, made by the first call; None where no policy is wanted.

    Args:
        cache_config: LMDeploy's `CacheConfig` of a model agent.
    """
    if not hasattr(cache_config, "sage_sparsity"):
        spec = getattr(cache_config, "sage", None)
        wanted = HookConfig.model_validate_json(spec).sparsity if spec else None
        cache_config.sage_sparsity = None
        if wanted is not None:
            from sagellm.accel.sparsity.registry import make_sparsity

            policy = make_sparsity(wanted.name, **wanted.options)
            cache_config.sage_sparsity = SparseSteps(policy, cache_config.block_size)
    return cache_config.sage_sparsity


def reading(cache_config: Any, inputs: Any) -> Any:
    """Return the `ModelInputs` of a step, with the blocks that a policy chose once for all layers."""
    steps = steps_of(cache_config)
    return inputs if steps is None else steps.inputs(inputs)


class SparseSteps:
    """Asks a policy in decode steps, counts, and stops asking when it fails: the steps then read everything."""

    def __init__(self, policy: SparsePolicy, block_size: int) -> None:
        self.policy = policy
        self._block_size = block_size
        self._num_steps = self._blocks_read = self._blocks_held = self._sequences = 0
        self._fault = ""
        self._shape: tuple[int, int, int] | None = None

    def bind(self, heads: int, kv_heads: int, head_size: int) -> None:
        """Take the shape of a model whose native step can ask for each layer."""
        self._shape = heads, kv_heads, head_size

    @property
    def is_on(self) -> bool:
        return not self._fault

    @property
    def is_of_layers(self) -> bool:
        return self.policy.per != "step"

    def check(self) -> None:
        """Raise SparsityError if the policy needs a native step and the model has none."""
        if self.is_of_layers and self._shape is None:
            raise SparsityError(
                f"sparse policy {self.policy.name} chooses for each {self.policy.per}, which only the CPU device's native step "
                "can do, and this model does not run in it; use a policy that chooses once a step, such as streaming."
            )

    def exchange(self, policy: SparsePolicy) -> None:
        """Ask another policy from the next step on. Blocks written before have bounds if the former one asked for them."""
        self.policy, self._fault = policy, ""

    def switch_off(self, fault: str) -> None:
        self._fault = fault
        logger.warning("sparse policy %s is switched off, steps read all blocks: %s", self.policy.name, fault)

    def inputs(self, inputs: Any) -> Any:
        """Return the inputs of a step for a policy that chooses once; those given if it reads everything."""
        if self._fault or self.is_of_layers or inputs.is_dummy or inputs.max_q_seqlen != 1:
            return inputs
        lengths = inputs.history_lengths + inputs.seq_length - inputs.num_ignored_history
        view = self._view(lengths.cpu().numpy())
        if (view.keep == view.num_blocks).all():
            self._count(view)
            return inputs
        chosen = self._ask(view)
        if chosen is None:
            return inputs
        self._count(view)
        positions = np.zeros((len(chosen), view.keep.max()), np.int64)
        for row, one in zip(positions, chosen, strict=True):
            row[: len(one)] = one
        tables = inputs.block_offsets
        seen = (view.keep - 1) * self._block_size + (view.lengths - 1) % self._block_size + 1
        ignored = torch.from_numpy(view.lengths - seen).to(inputs.num_ignored_history)
        return replace(
            inputs, block_offsets=tables.gather(1, torch.from_numpy(positions).to(tables.device)).contiguous(),
            num_ignored_history=inputs.num_ignored_history + ignored,
            max_kv_seqlen=int(seen.max()), sum_kv_seqlen=int(seen.sum()),
        )  # fmt: skip

    def of_layers(self, lengths: torch.Tensor, table_width: int) -> dict[str, Any] | None:
        """Return how a native step chooses blocks, as `CpuDecoder.run` takes it; None to read everything.

        Args:
            lengths: [sequences], tokens with the new one, each of one new token.
        """
        if self._fault or not self.is_of_layers:
            return None
        if not int(lengths.max()):  # a warm-up step, which has no cache
            return None
        view = self._view(lengths.numpy())
        self._count(view)
        if (view.keep == view.num_blocks).all():
            return None
        policy = self.policy
        is_native = type(policy).select_blocks is TopBlocks.select_blocks
        return {
            "keep": view.keep.tolist(), "weights": policy.weights, "by_head": view.by_head,
            "whole_layers": policy.whole_layers, "reach": policy.reach,
            "first": policy.first,
            "last": policy.last, "choose": None if is_native else self._chooser(view, table_width),
        }  # fmt: skip

    def report(self) -> dict[str, Any]:
        """Return the numbers of `/metrics`."""
        return {
            "policy": self.policy.name, "steps": self._num_steps, "sequences": self._sequences,
            "read": self._blocks_read, "held": self._blocks_held, "fault": self._fault,
        }  # fmt: skip

    def _view(self, lengths: np.ndarray) -> SparseView:
        lengths = lengths.astype(np.int64)
        blocks = -(-lengths // self._block_size)
        keep = np.array([self.policy.budget(each) for each in blocks.tolist()], np.int64)
        policy = self.policy
        return SparseView(
            step=self._num_steps, layer=-1, block_size=self._block_size, lengths=lengths, keep=np.clip(keep, 1, blocks),
            first=policy.first, last=policy.last, by_head=policy.per == "head",
        )  # fmt: skip

    def _count(self, view: SparseView) -> None:
        self._num_steps += 1
        self._sequences += len(view.lengths)
        self._blocks_read += int(view.keep.sum())
        self._blocks_held += int(view.num_blocks.sum())

    def _ask(self, view: SparseView) -> list[np.ndarray] | None:
        try:
            chosen = list(self.policy.select_blocks(view))
            fault = wrong_with(chosen, view, self._shape[1] if self._shape else 1)
        except Exception as error:
            fault = f"it raised {type(error).__name__}: {error}"
        if fault:
            self.switch_off(fault)
            return None
        return chosen

    def _chooser(self, view: SparseView, table_width: int) -> Any:
        """Return a function that a native step calls for each layer."""
        assert self._shape is not None
        heads, kv_heads, head_size = self._shape
        sequences, choices, most = len(view.lengths), kv_heads if view.by_head else 1, int(view.keep.max())
        has_weights = bool(self.policy.weights)

        def choose(layer: int, queries: int, weights: int, result: int) -> str:
            found = replace(
                view, layer=layer, queries=_floats(queries, sequences, heads, head_size),
                weights=_floats(weights, sequences, kv_heads, table_width) if has_weights else view.weights,
            )  # fmt: skip
            chosen = self._ask(found)
            if chosen is None:
                return self._fault
            rows = np.ctypeslib.as_array((ctypes.c_int64 * (sequences * choices * most)).from_address(result))
            for row, one in zip(rows.reshape(sequences, choices, most), chosen, strict=True):
                row[:, : np.shape(one)[-1]] = one
            return ""

        return choose


def _floats(address: int, *shape: int) -> np.ndarray:
    """A read-only array over memory of the native step."""
    array = np.ctypeslib.as_array((ctypes.c_float * int(np.prod(shape))).from_address(address)).reshape(shape)
    array.flags.writeable = False
    return array
