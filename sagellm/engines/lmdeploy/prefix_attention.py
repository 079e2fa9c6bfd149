"""Decode steps of a GPU that read the keys which sequences have in common once: groups of a step, and their attention.

LMDeploy's attention asks in every layer. It runs in Python in each step, since a CUDA graph would keep the groups of the step
that it was captured in.
"""

from typing import Any

from sagellm.core.config import HookConfig

__all__ = ["attended", "find", "groups_of"]

MIN_TOKENS = 256  # that a group has in common
# Estimates, not measured: two more kernels a layer, and an H100's memory.
LAUNCHES_S, BYTES_S = 10e-6, 3e12


def groups_of(cache_engine: Any, inputs: Any) -> Any:
    """Return the `Groups` of a decode step on the device of its tables; None if reading them together would not pay.

    Args:
        cache_engine: LMDeploy's `CacheEngine`.
        inputs: its `ModelInputs`, whose tables are read.
    """
    tables = inputs.block_offsets
    if tables.device.type == "cpu" or inputs.is_dummy or inputs.max_q_seqlen != 1 or not _is_wanted(cache_engine.cache_config):
        return None  # the CPU device finds its groups in the native step
    return find(cache_engine, inputs)


def find(cache_engine: Any, inputs: Any) -> Any:
    """As `groups_of`, for any device."""
    from sagellm.engines.lmdeploy.kernels.prefix_aware_attention import find_groups

    config, model = cache_engine.cache_config, cache_engine.model_config
    lengths = (inputs.history_lengths + inputs.seq_length - inputs.num_ignored_history).cpu().numpy()
    found = find_groups(inputs.block_offsets.cpu().numpy(), lengths, config.block_size, MIN_TOKENS)
    if found is None:
        return None
    saved_tokens = int(((found.starts.diff() - 1) * found.common).sum()) * config.block_size
    token_bytes = 2 * model.num_key_value_heads * model.head_dim * 2  # keys and values of a layer, in 16 bits
    return found.to(inputs.block_offsets.device) if saved_tokens * token_bytes > LAUNCHES_S * BYTES_S else None


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

    return prefix_aware_attention(
        query, k_cache, v_cache, metadata.block_offsets, metadata.kv_seqlens, attention.scale, sage_sparse.groups,
        softcap=attention.logit_softcapping or None,
    )  # fmt: skip


def _is_wanted(config: Any) -> bool:
    if not hasattr(config, "sage_prefixes"):
        config.sage_prefixes = HookConfig.model_validate_json(config.sage).prefix_attention == "auto"
    return config.sage_prefixes
