"""Times of our kernels on a GPU, beside LMDeploy's."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch

from benchmarks.gpu.limits import seconds

__all__ = ["time_attention", "time_copies"]

SHAPES = (
    (2, 1024, 200), (2, 16384, 200), (4, 4096, 200), (8, 2048, 200), (16, 1024, 200), (16, 4096, 200), (16, 4096, 2000),
    (16, 16384, 200), (64, 512, 200), (64, 4096, 200),
)  # fmt: skip
LAYERS_BYTES = 300_000_000  # keys and values of all layers, several times what a GPU's cache holds


def time_copies() -> tuple[dict[str, dict[str, float]], bool]:
    """Bytes of 8 and of 64 blocks a second, ours and LMDeploy's: 32 layers, 64 tokens a block, 8 key heads of 128."""
    from lmdeploy.pytorch.engine.cache_engine import CacheEngine

    from sagellm.engines.lmdeploy.kernels.block_copy import PinnedCopies

    shape, names = (32, 96, 64, 8, 128), ("ours", "lmdeploy")
    pool, *hosts = (
        [torch.randn(shape).to(torch.bfloat16).to(device) for _ in range(2)] for device in ("cuda", "cpu", "cpu")
    )  # fmt: skip
    figures, is_right = {}, True
    for name, host in zip(names, hosts, strict=True):
        engine = SimpleNamespace(
            full_gpu_cache=pool, full_cpu_cache=host, cache_stream=torch.cuda.Stream(), events=torch.cuda.Event()
        )
        swap_in, swap_out = (
            lambda moves, engine=engine, host=host: CacheEngine._swap(engine, host, pool, moves),
            lambda moves, engine=engine, host=host: CacheEngine._swap(engine, pool, host, moves),
        )
        if name == "ours":
            PinnedCopies(engine)
            swap_in, swap_out = engine.swap_in, engine.swap_out
        for count in (8, 64):
            moves = {block: 95 - block for block in range(count)}
            num_bytes = 2 * count * pool[0][:, 0].numel() * 2
            swap_in(moves)
            torch.cuda.synchronize()
            is_right &= all(torch.equal(to[:, 95].cpu(), source[:, 0]) for to, source in zip(pool, host, strict=True))
            for way, swap in (("cpu_to_gpu", swap_in), ("gpu_to_cpu", swap_out)):
                taken_s = seconds(lambda swap=swap, moves=moves: swap(moves))
                figures[f"{name}, {way}, {count} blocks"] = num_bytes / taken_s / 1e9
            swap_out(moves)
            torch.cuda.synchronize()
            is_right &= all(torch.equal(to[:, 95], source[:, 0].cpu()) for to, source in zip(host, pool, strict=True))
    return figures, is_right


def time_attention(shapes: Sequence[tuple[int, int, int]] = SHAPES) -> tuple[dict[str, dict[str, float]], float]:
    """Seconds of a layer's decode attention in a CUDA graph, ours and LMDeploy's, and how far they differ at most.

    32 heads, 8 key heads of 128.

    Args:
        shapes: sequences, tokens in common, and tokens of each for itself.
    """
    from lmdeploy.pytorch.kernels.cuda import paged_attention_fwd

    from sagellm.engines.lmdeploy.kernels.prefix_aware_attention import find_groups, prefix_aware_attention
    from sagellm.engines.lmdeploy.prefix_attention import StepGroups

    block, heads, kv_heads, size, width = 64, 32, 8, 128, 1024
    figures, error = {}, 0.0
    for sequences, common, own in shapes:
        shared, alone = common // block, -(-(own + 1) // block)
        tables = torch.zeros(sequences, width, dtype=torch.int32)
        for row, table in enumerate(tables):
            table[:shared] = torch.arange(shared)
            table[shared : shared + alone] = torch.arange(shared + row * alone, shared + (row + 1) * alone)
        lengths = torch.full((sequences,), common + own + 1, dtype=torch.int32)
        held = StepGroups(sequences, torch.device("cuda"))
        held.fill(find_groups(tables.numpy(), lengths.numpy(), block, 256))
        tables, lengths = tables.cuda(), lengths.cuda()
        # Layers have caches of their own, so that none is read from the GPU's cache.
        blocks = shared + sequences * alone
        layers = -(-LAYERS_BYTES // (2 * blocks * block * kv_heads * size * 2))
        caches = torch.randn(layers, 2, blocks, block, kv_heads, size, device="cuda", dtype=torch.bfloat16)
        query = torch.randn(sequences, heads, size, device="cuda").bfloat16()
        theirs, groups, ours = torch.empty_like(query), held.of(sequences, width), []

        def lmdeploy(layer, query=query, caches=caches, theirs=theirs, tables=tables, lengths=lengths) -> None:
            paged_attention_fwd(query, *caches[layer], theirs, tables, kv_seqlens=lengths, sm_scale=size**-0.5)

        def shares(layer, query=query, caches=caches, tables=tables, lengths=lengths, groups=groups, ours=ours) -> None:
            ours[:] = [prefix_aware_attention(query, *caches[layer], tables, lengths, size**-0.5, groups)]

        times = {name: _in_a_graph(work, layers) for name, work in (("ours", shares), ("lmdeploy", lmdeploy))}
        error = max(error, float((ours[0] - theirs).abs().max()))
        figures[f"{sequences} x ({common} + {own})"] = times
    return figures, error


def _in_a_graph(work: Callable[[int], None], layers: int) -> float:
    """Seconds of one layer, when a CUDA graph calls `work` for so many layers at least."""
    layers_twice = [*range(layers)] * max(1, -(-16 // layers))
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers_twice:
            work(layer)
    return seconds(graph.replay) / len(layers_twice)
