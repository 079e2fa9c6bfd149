"""KV blocks in memory that other engines may read: what the inserted line in LMDeploy's cache engine calls."""

from typing import Any

from sagellm.comm_backend.kv_transfer.registry import find_channel
from sagellm.core.config import HookConfig
from sagellm.engines.lmdeploy.pd.migration_backend import register_group

__all__ = ["shared_caches"]


def shared_caches(cache_engine: Any, caches: tuple) -> tuple:
    """The pool's tensors as the channel of this engine wants them; `caches`, as LMDeploy has allocated them, still unused,
    if the channel takes any. One of several workers is from now on ready to serve them, and LMDeploy's own migration
    knows the channels, which it looks for in the process that has the pool.
    """
    spec = cache_engine.cache_config.sage
    pd = HookConfig.model_validate_json(spec).pd if spec is not None else None
    if pd is None or pd.role is None:
        return caches
    register_group(pd)
    if cache_engine.world_size > 1:
        from sagellm.engines.lmdeploy.pd.rank_server import offer_channel

        offer_channel(cache_engine, pd)
    channel = find_channel(pd.channel)
    if caches[0].device.type not in channel.device_types:
        return caches
    return tuple(channel.empty(tensor.shape, tensor.dtype) if tensor.numel() else tensor for tensor in caches)
