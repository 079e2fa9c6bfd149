"""LMDeploy's own cache engine on the CPU device, small, without an engine around it."""

from types import SimpleNamespace

import torch
from lmdeploy import sage_device
from lmdeploy.pytorch.config import CacheConfig, ModelConfig
from lmdeploy.pytorch.disagg.config import DistServeEngineConfig
from lmdeploy.pytorch.disagg.conn.protocol import DistServeInitRequest, MigrationProtocol
from lmdeploy.pytorch.engine.cache_engine import CacheEngine

LAYERS, BLOCK_SIZE, HEAD_DIM = 3, 4, 8


def cache_config(num_blocks, **change):
    values = dict(max_batches=1, block_size=BLOCK_SIZE, num_cpu_blocks=0, num_gpu_blocks=num_blocks, device_type="cpu")
    return CacheConfig(**values | change)


def model_config(num_heads=2, copies=1, **change):
    """`copies`: ranks that hold the same head, as LMDeploy notes it in a model's configuration."""
    hf_config = SimpleNamespace(num_replicate_key_value_heads=copies) if copies > 1 else SimpleNamespace()
    values = dict(
        hidden_size=64, num_layers=LAYERS, num_attention_heads=8, num_key_value_heads=num_heads, bos_token_id=0,
        eos_token_id=[1], head_dim=HEAD_DIM, dtype=torch.float32, hf_config=hf_config, llm_config=hf_config,
    )  # fmt: skip
    return ModelConfig(**(values | change))


def cache_engine(num_blocks, rank=0, ranks=1, quant_policy=0, sage=None, **model):
    """`sage`: JSON of a `HookConfig`."""
    sage_device.activate("cpu")
    config = cache_config(num_blocks, quant_policy=quant_policy, block_size=16 if quant_policy else BLOCK_SIZE)
    config.sage = sage
    return CacheEngine(config, model_config(**model), rank=rank, tp_rank=rank, world_size=ranks)


def init_request(own_id, engine, peer_id, num_peer_blocks, peer_ranks=1):
    """Return the request by which LMDeploy's proxy introduces a peer."""

    def config(num_blocks, ranks):
        return DistServeEngineConfig(
            tp_size=ranks, ep_size=1, dp_size=1, pp_size=1, dp_rank=0, block_size=BLOCK_SIZE, num_cpu_blocks=0,
            num_gpu_blocks=num_blocks,
        )  # fmt: skip

    return DistServeInitRequest(
        local_engine_id=own_id, local_engine_config=config(engine.num_gpu_blocks, engine.world_size),
        remote_engine_id=peer_id, remote_engine_config=config(num_peer_blocks, peer_ranks), protocol=MigrationProtocol.TCP,
    )  # fmt: skip
