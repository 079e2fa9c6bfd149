"""Copies of KV blocks between a GPU and the host, by a kernel that reads and writes the host's memory over the bus.

A block lies in as many places as there are layers, and one call of the runtime for each of them takes longer than its bytes.
LMDeploy gathers blocks on one side first. Here one kernel copies all places of all blocks, as fast as the bus allows.
"""

import weakref
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

__all__ = ["PinnedCopies", "copy_blocks"]

WORDS = 2048  # of 8 bytes, that a program copies


@triton.jit
def _copy_kernel(
    source, target, pairs, words, source_layer, source_block, target_layer, target_block, WORDS: tl.constexpr
):  # fmt: skip
    """Copy a piece of a block in one layer. The programs of a block follow each other."""
    place = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    layer = tl.program_id(1).to(tl.int64)
    is_word = place < words
    first, last = tl.load(pairs + 2 * tl.program_id(2)), tl.load(pairs + 2 * tl.program_id(2) + 1)
    found = tl.load(source + layer * source_layer + first * source_block + place, mask=is_word)
    tl.store(target + layer * target_layer + last * target_block + place, found, mask=is_word)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks on the current stream.

    Args:
        source, target: [layers, blocks, ...] with dense blocks, on a GPU or in host memory that it can reach. The bytes of a
            block in a layer are a multiple of 8.
        pairs: int64 [pairs, 2], on the GPU: a block of the source, and where it goes. No block is named twice.
    """
    source, target = (each.flatten(2).view(torch.int64) for each in (source, target))
    layers, _, words = source.shape
    _copy_kernel[(triton.cdiv(words, WORDS), layers, len(pairs))](
        source, target, pairs, words, *source.stride()[:2], *target.stride()[:2], WORDS=WORDS
    )


class PinnedCopies:
    """Makes the `swap_in` and `swap_out` of LMDeploy's `CacheEngine` on a GPU copy by `copy_blocks`, and wait for the end.

    The memory of its host cache is pinned as long as it lives.

    Raises:
        RuntimeError: it cannot be pinned, or its blocks have other sizes than the kernel takes. Nothing was changed.
    """

    def __init__(self, cache_engine: object) -> None:
        self._engine = cache_engine
        host, pool = cache_engine.full_cpu_cache, cache_engine.full_gpu_cache
        if any(cache[0, 0].numel() * cache.element_size() % 8 for cache in host):
            raise RuntimeError("a block in a layer is not a multiple of 8 bytes")
        for cache in host:
            pin(cache)
        cache_engine.swap_in = lambda moves: self._copy(host, pool, moves)
        cache_engine.swap_out = lambda moves: self._copy(pool, host, moves)

    @torch.inference_mode()
    def _copy(self, source: Sequence[torch.Tensor], target: Sequence[torch.Tensor], moves: Mapping[int, int]) -> None:
        engine = self._engine
        engine.cache_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(engine.cache_stream):
            pairs = torch.tensor(list(moves.items())).to(engine.full_gpu_cache[0].device)
            for one, other in zip(source, target, strict=True):
                copy_blocks(one, other, pairs)
            engine.events.record(stream=engine.cache_stream)
        # The host's blocks are read by other threads, and freed for new ones, once the call is over.
        engine.events.synchronize()


def pin(tensor: torch.Tensor) -> None:
    """Pin the memory of a dense host tensor for as long as the tensor lives. Raises RuntimeError: the driver refuses."""
    runtime, start = torch.cuda.cudart(), tensor.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(start, tensor.numel() * tensor.element_size(), 0))
    weakref.finalize(tensor, runtime.cudaHostUnregister, start).atexit = False
