"""A process with LMDeploy's own cache engine that takes part in a migration; started by tests.

`python -m tests.engines.lmdeploy.pd.migration_owner CHANNEL NUM_BLOCKS`: it prints LMDeploy's endpoint information, reads that
of its peer, connects, says how that went, and ends when its standard input does.
"""

import sys

import torch
from lmdeploy.pytorch.disagg.conn.protocol import DistServeKVTransferEndpointInfo

from sagellm.comm_backend.kv_transfer.base import TransferOptions
from sagellm.comm_backend.kv_transfer.registry import find_channel
from sagellm.core.errors import TransferError
from sagellm.engines.lmdeploy.pd.migration_backend import choice, register
from tests.engines.lmdeploy.pd.caches import cache_engine, init_request

KEY = b"a key of the group"
OWNER, READER = "http://127.0.0.1:1", "http://127.0.0.1:2"


def engine_of(channel, num_blocks, seed=None, key=KEY, **model):
    """LMDeploy's cache engine with that channel's backend; `seed`: its content, zeros without one."""
    register(TransferOptions(key=key), timeout_s=20)
    engine = cache_engine(num_blocks, **model)
    engine.cache_config.migration_backend = choice(channel)
    # A channel may want memory of its own, which an engine allocates by it.
    empty = find_channel(channel).empty
    engine.full_gpu_cache = tuple(empty(tensor.shape, tensor.dtype) for tensor in engine.full_gpu_cache)
    engine.local_gpu_cache = list(zip(*engine.full_gpu_cache, strict=True))
    generator = torch.Generator().manual_seed(seed or 0)
    for tensor in engine.full_gpu_cache:
        tensor[:] = torch.randn(tensor.shape, generator=generator) if seed is not None else 0
    return engine


def main(channel, num_blocks):
    engine = engine_of(channel, int(num_blocks), seed=1)
    print("INFO " + engine.p2p_initialize(init_request(OWNER, engine, READER, 5)).model_dump_json(), flush=True)
    told = DistServeKVTransferEndpointInfo.model_validate_json(sys.stdin.readline())
    try:
        engine.p2p_connect(READER, [told])
        print("CONNECTED", flush=True)
    except TransferError as error:
        print(f"REFUSED {error}", flush=True)
    sys.stdin.read()  # whether or not: the other side has yet to hear what this one has to say
    engine.migration_backend_impl.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
