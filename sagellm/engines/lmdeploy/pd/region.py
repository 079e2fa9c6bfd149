"""LMDeploy's KV blocks as a `KVRegion`: which tensors its cache engine holds, and what their axes are."""

from typing import Any

import torch

from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVPart, KVRegion
from sagellm.core.errors import TransferError
from sagellm.engines.lmdeploy.cpu.cache import KEY_GROUP

__all__ = ["PARTS", "region_of"]

# In the order of LMDeploy's `full_gpu_cache`; the last two hold scale and zero point of quantized ones.
PARTS = ("keys", "values", "key_scales", "value_scales")


def region_of(cache_engine: Any) -> KVRegion:
    """The blocks of this worker, as views of LMDeploy's own memory: nothing is copied.

    Parts are those of `PARTS` that are there: a model with latent attention (MLA) has keys only, an unquantized cache no
    scales. Values that LMDeploy packs (4 bits) are bytes here, half as many as a head is wide.

    Args:
        cache_engine: an lmdeploy.pytorch.engine.cache_engine.CacheEngine.

    Raises:
        TransferError: a device that orders its blocks in another way than [layers, blocks, block_size, heads, head_dim].

    Source: LMDeploy 0.11.0, pytorch/engine/cache_engine.py (`_allocate_cache`) and pytorch/configurations/builder.py
    (`update_num_kv_heads`).
    """
    tensors = tuple(cache_engine.full_gpu_cache)
    held = [(name, tensor) for name, tensor in zip(PARTS, tensors, strict=False) if tensor.numel()]
    num_heads, total_heads, first_head = _heads(cache_engine)
    blocks = (cache_engine.num_layers, cache_engine.num_gpu_blocks, cache_engine.block_size, num_heads)
    for name, tensor in held:
        if tuple(tensor.shape[:-1]) != blocks:
            raise TransferError(
                f"LMDeploy's {name} are {tuple(tensor.shape)}; blocks that are moved begin with {blocks} (layers, blocks, "
                f"tokens, heads), which is how the CPU device, CUDA and Ascend 910 order them. This device cannot take part."
            )
    layout = KVLayout(
        num_layers=blocks[0],
        num_blocks=blocks[1],
        block_size=blocks[2],
        total_heads=total_heads,
        first_head=first_head,
        tp_rank=cache_engine.tp_rank,
        tp_size=cache_engine.world_size,
        parts=tuple(
            KVPart(
                name=name, num_heads=num_heads, width=tensor.shape[-1], dtype=str(tensor.dtype).removeprefix("torch."),
                group=KEY_GROUP if name == "keys" and tensor.dtype == torch.uint8 and tensor.device.type == "cpu" else 1,
            )
            for name, tensor in held
        ),
    )
    return KVRegion(layout, tuple(tensor for _, tensor in held))


def _heads(cache_engine: Any) -> tuple[int, int, int]:
    """Heads on this rank, of the model, and the first one here.

    Where a model has fewer KV heads than there are ranks, LMDeploy says that it has one for each rank, and loads each head
    into `num_replicate_key_value_heads` ranks in a row.
    """
    model, ranks = cache_engine.model_config, cache_engine.world_size
    num_heads = model.num_key_value_heads // ranks
    copies = _copies(model) if model.num_key_value_heads == ranks else 1
    return num_heads, model.num_key_value_heads // copies, cache_engine.tp_rank * num_heads // copies


def _copies(model: Any) -> int:
    configs = (model.llm_config, model.hf_config)
    return max(int(getattr(config, "num_replicate_key_value_heads", 1) or 1) for config in configs)
