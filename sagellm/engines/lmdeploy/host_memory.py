"""The bytes of the host tier's slots: LMDeploy's host cache, where it lies in this process."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from sagellm.core.collectives import CommRule
from sagellm.core.errors import PluginError

logger = logging.getLogger(__name__)

RULES = "rules"  # among the moves of a step
BlockBytes = np.ndarray  # uint8 [block_bytes]


class SlotMemory(Protocol):
    """`slot`: number of a host slot. Nothing else may copy from or to it meanwhile."""

    def read(self, slot: int) -> BlockBytes: ...

    def read_pool(self, slot: int) -> BlockBytes | None:
        """Bytes of a slot of the pool; None where that is not memory of this process."""
        ...

    def write(self, slot: int, block: BlockBytes) -> None: ...


class HostCache:
    """LMDeploy's host cache: a tensor each for keys and values (and scales), of shape [layers, slots, ...].

    So a block is not contiguous: it is gathered and scattered layer by layer, keys before values.
    """

    def __init__(self, cache_engine: Any) -> None:
        import torch

        def rows_of(tensors: Any) -> list[np.ndarray]:
            return [tensor.view(torch.uint8).flatten(2).numpy() for tensor in tensors]

        self._rows = rows_of(cache_engine.full_cpu_cache)  # uint8 [layers, slots, bytes of a slot in a layer]
        pool = cache_engine.full_gpu_cache
        self._pool_rows = rows_of(pool) if all(tensor.device.type == "cpu" for tensor in pool) else None
        self.block_bytes = sum(rows.shape[0] * rows.shape[2] for rows in self._rows)

    def read(self, slot: int) -> BlockBytes:
        return _gather(self._rows, slot)

    def read_pool(self, slot: int) -> BlockBytes | None:
        return None if self._pool_rows is None else _gather(self._pool_rows, slot)

    def write(self, slot: int, block: BlockBytes) -> None:
        start = 0
        for rows in self._rows:
            end = start + rows.shape[0] * rows.shape[2]
            rows[:, slot] = block[start:end].reshape(rows.shape[0], rows.shape[2])
            start = end


def _gather(tensors: list[np.ndarray], slot: int) -> BlockBytes:
    return np.concatenate([rows[:, slot].reshape(-1) for rows in tensors])


def cache_engine_of(executor: Any) -> Any:
    """LMDeploy's `CacheEngine`; None where it lives in other processes, as with several workers, or there is no executor."""
    return getattr(getattr(executor, "model_agent", None), "cache_engine", None)


def open_host_cache(cache_engine: Any, num_host_blocks: int, block_bytes: int) -> HostCache:
    """Raises PluginError: no host tier, memory of another process, or blocks of another size than was announced."""
    if not num_host_blocks:
        raise PluginError("there is no host tier (host_kv_blocks is 0).")
    if cache_engine is None:
        raise PluginError("the memory of the host tier is the workers' own (tensor_parallel above 1); use one worker.")
    cache = HostCache(cache_engine)
    if cache.block_bytes != block_bytes:
        raise PluginError(f"a block of the host tier has {cache.block_bytes} bytes, announced were {block_bytes}.")
    return cache


def with_copies(
    moves: dict[int, int], copies: dict[int, int], rules: tuple[CommRule, ...] | None = None
) -> dict[Any, Any]:
    """Let what else precedes a step ride with copies from the host.

    All workers get the copies of a step in its message, and read them where the step begins. So rules change before the same
    collective on all workers.

    Args:
        copies: inside the pool, target -> source; their keys are below 0.
        rules: of collectives, if they are other ones from this step on.
    """
    if copies:
        moves = moves | {-1 - target: source for target, source in copies.items()}
    return moves if rules is None else moves | {RULES: rules}


def make_copies(cache_engine: Any, moves: dict[int, int]) -> dict[int, int]:
    """Take what rides with the moves of a step: copies inside the pool of this worker, after blocks have left for the host, and
    rules of collectives. Return the moves from the host."""
    import torch
    from lmdeploy import sage_comm, sage_device

    rules = moves.pop(RULES, None)
    if rules is not None and sage_comm.observer is not None:
        sage_comm.observer.follow(rules)
    pairs = {-1 - key: source for key, source in moves.items() if key < 0}
    if not pairs:
        return moves
    cache_engine.events.wait()
    with torch.inference_mode():
        for cache in sage_device.as_bytes(cache_engine.full_gpu_cache):
            cache[:, list(pairs)] = cache[:, list(pairs.values())]  # all are read before any is written
    return {key: target for key, target in moves.items() if key >= 0}


def copies_at_once(cache_engine: Any, device: str) -> bool:
    """Whether the copies between pool and host tier have ended when the calls for them return, made so on a GPU."""
    if device != "cuda":
        return device == "cpu"
    try:
        from sagellm.engines.lmdeploy.kernels.block_copy import PinnedCopies

        PinnedCopies(cache_engine)
    except (ImportError, RuntimeError) as error:
        logger.warning("blocks are copied by LMDeploy, slowly, and not timed: %s", error)
        return False
    return True


class SwapTimes:
    """Measures how long a `CacheEngine` whose copies are synchronous takes for those of each pass."""

    def __init__(self, cache_engine: Any) -> None:
        self._spent_s: deque[float] = deque()
        for name in ("swap_in", "swap_out"):
            setattr(cache_engine, name, self._timed(getattr(cache_engine, name)))

    def take(self, num_calls: int) -> float:
        """Seconds of the next calls, those of one pass. Passes run in the order in which they were sent."""
        return sum(self._spent_s.popleft() for _ in range(min(num_calls, len(self._spent_s))))

    def _timed(self, swap: Callable[[dict[int, int]], None]) -> Callable[[dict[int, int]], None]:
        def timed(src_to_dst: dict[int, int]) -> None:
            start = time.perf_counter()
            swap(src_to_dst)
            self._spent_s.append(time.perf_counter() - start)

        return timed
