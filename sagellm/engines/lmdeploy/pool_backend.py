"""LMDeploy's block pool as a `KVBackendProtocol`, with blocks that plug-ins reserve, and the latencies of its calls."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sagellm.core.errors import CapacityError, PluginError
from sagellm.core.hooks import AllocationResult, MigrationPlan, MigrationResult, Tier
from sagellm.engines.lmdeploy.requests import tenant_of
from sagellm.kv_runtime.base import BlockKey, KVBackendProtocol, KVPool

__all__ = ["LMDeployPool", "Latency"]

BOUNDS_S = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2, 0.1)


class Latency:
    """Histogram of durations: calls by upper bound (`BOUNDS_S`, then no bound), and their sum in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def since(self, start_s: float) -> None:
        """Count a call that began at `start_s` (`time.perf_counter`) and has just ended."""
        duration_s = time.perf_counter() - start_s
        self._counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self._sum_s += duration_s

    def report(self) -> dict[str, Any]:
        return {"bounds_s": list(BOUNDS_S), "counts": list(self._counts), "sum_s": self._sum_s}


class LMDeployPool(KVPool, KVBackendProtocol):
    """Allocates from LMDeploy's own allocator, beside its requests.

    An allocated block is a reservation: it has one reference, no token and no request. LMDeploy has fewer blocks for
    requests until it is given back. Block ids are LMDeploy's logical ids.

    Args:
        scheduler: LMDeploy's scheduler.
        kv: the manager of this engine's blocks, which moves, evicts and counts them.
    """

    def __init__(self, scheduler: Any, kv: Any) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._allocator = scheduler.block_manager.allocator
        blocks = scheduler.block_manager
        self._capacity = {Tier.GPU: blocks.num_gpu_blocks, Tier.CPU: blocks.num_cpu_blocks}
        self.block_size: int = kv.block_size
        self.block_bytes: int = kv.block_bytes
        self._owner_of: dict[int, str] = {}  # reserved block -> plug-in
        self.latencies = {name: Latency() for name in ("allocate", "free", "migrate")}
        self.copied = {"gpu->cpu": [0, 0.0], "cpu->gpu": [0, 0.0]}  # bytes, seconds

    @property
    def reserved(self) -> list[int]:
        return list(self._owner_of)

    def capacity(self, tier: Tier) -> int:
        return self._capacity.get(tier, 0)

    def num_free(self, tier: Tier) -> int:
        if not self.capacity(tier):
            return 0
        return int(self._allocator.get_phy_allocator(tier.value).get_num_free_blocks())

    def allocate(self, count: int, owner: str = "") -> AllocationResult:
        """Reserve free blocks of the pool.

        Args:
            count: blocks, 0 or more.
            owner: the plug-in that asks; only it can give them back.

        Raises:
            CapacityError: fewer are free; nothing was reserved and nothing evicted.
            PluginError: a negative count.
        """
        if count < 0:
            raise PluginError(f"cannot allocate {count} blocks; ask for 0 or more.")
        free = self.num_free(Tier.GPU)
        if count > free:
            total = self.capacity(Tier.GPU)
            raise CapacityError(f"cannot allocate {count} blocks: {free} of {total} are free; drop some first.")
        start_s = time.perf_counter()
        ids = self._allocator.allocate(count, "gpu").tolist()
        self.latencies["allocate"].since(start_s)
        self._owner_of.update(dict.fromkeys(ids, owner))
        return AllocationResult(tuple(ids), Tier.GPU)

    def free(self, block_ids: Sequence[int], owner: str = "") -> None:
        """Give reserved blocks back.

        Raises:
            PluginError: a block that this owner did not reserve, or one named twice; nothing was freed.
        """
        foreign = [block for block in block_ids if self._owner_of.get(block) != owner]
        if foreign or len(set(block_ids)) != len(block_ids):
            raise PluginError(f"cannot free blocks {foreign or list(block_ids)}: name allocated blocks of yours, each once.")
        for block in block_ids:
            del self._owner_of[block]
        if block_ids:
            start_s = time.perf_counter()
            self._allocator.free(np.array(block_ids, np.int64))
            self.latencies["free"].since(start_s)

    def free_all_of(self, owner: str) -> None:
        self.free([block for block, name in self._owner_of.items() if name == owner], owner)

    def owners(self) -> set[str]:
        return set(self._owner_of.values())

    def get_utilization(self) -> float:
        """Return the share of the pool's blocks that are not free, 0 to 1."""
        return 1 - self.num_free(Tier.GPU) / self.capacity(Tier.GPU)

    def get_fragmentation(self) -> float:
        """Return the share of the slots in allocated blocks that hold no token, 0 to 1. O(requests).

        Cached blocks are full. Empty slots are those of requests beyond their computed tokens, and all of reserved blocks.
        """
        num_allocated = (self.capacity(Tier.GPU) - self.num_free(Tier.GPU)) * self.block_size
        if not num_allocated:
            return 0.0
        num_empty = len(self._owner_of) * self.block_size
        for seq in self._sequences():
            num_empty += max(seq.num_blocks * self.block_size - seq.num_history_ids + seq.num_ignored_history, 0)
        return min(num_empty / num_allocated, 1.0)

    def migrate(self, plan: MigrationPlan) -> MigrationResult:
        return self._kv.migrate(plan)

    def drop(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """Give up those of the cached blocks that lie on the tier."""
        ids = np.array(keys, np.int64)
        self._kv.drop(ids[self._kv.on_device(ids) == (tier is Tier.GPU)].tolist(), (), "pool")

    def note_copies(self, bytes_in: int, bytes_out: int, seconds: float) -> None:
        """Count the copies of one forward pass. A pass that copied both ways tells no rate, and is not counted."""
        if not (bytes_in and bytes_out):
            row = self.copied["cpu->gpu" if bytes_in else "gpu->cpu"]
            row[0] += bytes_in or bytes_out
            row[1] += seconds

    def tenants_of(self, block_ids: Iterable[int]) -> dict[int, str]:
        """Return block -> tenant, of the blocks that a request holds now."""
        wanted, found = set(block_ids), {}
        for seq in self._sequences():
            if tenant := tenant_of(seq):
                found |= dict.fromkeys(wanted.intersection(seq.logical_blocks.get_real_blocks().tolist()), tenant)
        return found

    def report(self) -> dict[str, Any]:
        """Return what `/metrics` shows; picklable."""
        return {
            "utilization": self.get_utilization(), "fragmentation": self.get_fragmentation(), "reserved": len(self._owner_of),
            "latencies": {name: latency.report() for name, latency in self.latencies.items()},
            "copied": {name: list(row) for name, row in self.copied.items()},
        }  # fmt: skip

    def _sequences(self) -> Iterable[Any]:
        return (seq for session in self._scheduler.sessions.values() for seq in session.sequences.values())
