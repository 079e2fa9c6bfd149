"""Decode steps of a GPU that read the keys which sequences have in common once: groups of a step, and their attention.

LMDeploy's attention asks in every layer. The groups lie in memory that stays where it is, so that a CUDA graph which was
captured in one step serves the groups of later ones.
"""

from typing import Any

import torch

from sagellm.core.config import HookConfig

__all__ = ["StepGroups", "attended", "find", "groups_of"]

MIN_TOKENS = 256  # that a group has in common
# A layer's gain on an H100, within 4 us over ten shapes. LMDeploy's kernel reads shared keys again at SHARED_BYTES_S, out
# of the GPU's cache. Ours reads what a sequence has for itself more slowly, by 1 / OWN_BYTES_S, and takes LAUNCHES_S more.
SHARED_BYTES_S, OWN_BYTES_S, LAUNCHES_S = 10e12, 5e12, 3e-6


class StepGroups:
    """Groups of decode steps, in the same memory in each step.

    Args:
        sequences: of a step, at most.
    """

    def __init__(self, sequences: int, device: torch.device) -> None:
        sizes = sequences, sequences // 2 + 1, sequences // 2, sequences
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros_like(self._host, device=device)
        self._host_parts, self._device_parts = (memory.split(sizes) for memory in (self._host, self._device))
        self._limits = (0, 0, 0)

    @property
    def graph_key(self) -> tuple[int, int, int]:
        """All that a captured graph depends on: rounded numbers of groups, of common blocks, and of a sequence's own."""
        return self._limits

    def fill(self, found: Any) -> None:
        """Take the `Groups` of a step, which lie on the host. Earlier copies must have ended."""
        _, starts, common, shared = self._host_parts
        starts.fill_(len(found.members))
        common.zero_()
        shared.zero_()
        for memory, values in zip(self._host_parts, (found.members, found.starts, found.common, found.shared), strict=True):
            memory[: len(values)] = values
        self._device.copy_(self._host, non_blocking=True)
        self._limits = _rounded(len(found.common), 2), _rounded(found.most_common, 4), _rounded(found.most_own, 4)

    def of(self, sequences: int, width: int) -> Any:
        """Return the `Groups` for a step of so many sequences, whose tables have so many blocks."""
        from sagellm.engines.lmdeploy.kernels.prefix_aware_attention import Groups

        members, starts, common, shared = self._device_parts
        groups, most_common, most_own = self._limits
        groups = min(groups, len(common))
        return Groups(
            members, starts[: groups + 1], common[:groups], shared[:sequences], most_members=sequences,
            most_common=min(most_common, width - 1), most_own=most_own,
        )  # fmt: skip


class _Finder:
    """Finds the groups of an engine's steps, once a round of decode steps: tables of a round stay, and texts only grow."""

    def __init__(self, most_sequences: int, device: torch.device) -> None:
        self._groups = StepGroups(most_sequences, device)
        self._tables: Any = None
        self._pays = False

    def groups(self, cache_engine: Any, inputs: Any) -> StepGroups | None:
        if inputs.block_offsets is not self._tables:
            self._tables = inputs.block_offsets
            found = find(cache_engine, inputs)
            self._pays = found is not None
            if found is not None:
                self._groups.fill(found)
        return self._groups if self._pays else None


def groups_of(cache_engine: Any, inputs: Any) -> StepGroups | None:
    """Return the groups of a decode step, on the device of its tables; None if reading them together would not pay.

    Args:
        cache_engine: LMDeploy's `CacheEngine`.
        inputs: its `ModelInputs`, whose tables are read.
    """
    device, config = inputs.block_offsets.device, cache_engine.cache_config
    if device.type == "cpu" or inputs.is_dummy or inputs.max_q_seqlen != 1:
        return None  # the CPU device finds its groups in the native step
    if not hasattr(config, "sage_prefixes"):
        is_wanted = HookConfig.model_validate_json(config.sage).prefix_attention == "auto"
        config.sage_prefixes = _Finder(config.max_batches, device) if is_wanted else None
    return None if config.sage_prefixes is None else config.sage_prefixes.groups(cache_engine, inputs)


def find(cache_engine: Any, inputs: Any) -> Any:
    """Return the `Groups` of a step on the host, for any device; None if they would not pay. Waits for the device."""
    from sagellm.engines.lmdeploy.kernels.prefix_aware_attention import find_groups

    config, model = cache_engine.cache_config, cache_engine.model_config
    lengths = (inputs.history_lengths + inputs.seq_length - inputs.num_ignored_history).cpu().numpy()
    found = find_groups(inputs.block_offsets.cpu().numpy(), lengths, config.block_size, MIN_TOKENS)
    if found is None:
        return None
    saved_tokens = int(((found.starts.diff() - 1) * found.common).sum()) * config.block_size
    own_tokens = int(lengths.sum()) - int(found.shared.sum()) * config.block_size
    token_bytes = 2 * model.num_key_value_heads * model.head_dim * 2  # keys and values of a layer, in 16 bits
    gain_s = token_bytes * (saved_tokens / SHARED_BYTES_S - own_tokens / OWN_BYTES_S) - LAUNCHES_S
    return found if gain_s > 0 else None


def attended(attention: Any, query: Any, k_cache: Any, v_cache: Any, metadata: Any, sinks: Any) -> Any:
    """Return the attention of a decode step whose groups were found; None where LMDeploy's own kernel must read the cache.

    Args:
        attention: LMDeploy's `TritonAttentionImpl`.
        metadata: its `TritonAttentionMetadata`.
        sinks: learned scores of the beginning, or None.
    """
    from lmdeploy import sage_sparse

    other = (attention.alibi, attention.sliding_window, attention.block_sparse_size > 1, metadata.quant_policy)
    if any(other) or sinks is not None or len(query) != len(metadata.kv_seqlens):
        return None
    from sagellm.engines.lmdeploy.kernels.prefix_aware_attention import prefix_aware_attention

    tables = metadata.block_offsets
    return prefix_aware_attention(
        query, k_cache, v_cache, tables, metadata.kv_seqlens, attention.scale, sage_sparse.groups.of(*tables.shape),
        softcap=attention.logit_softcapping or None,
    )  # fmt: skip


def _rounded(number: int, base: int) -> int:
    """Return the power of a base that is not smaller."""
    power = 1
    while power < number:
        power *= base
    return power
