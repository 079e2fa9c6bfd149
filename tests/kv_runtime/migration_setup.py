"""A migrator between a host store and one on disk, both of which can be made to fail."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from sagellm.core.hooks import MigrationPlan, MigrationResult, Tier
from sagellm.kv_runtime.base import StoreFullError
from sagellm.kv_runtime.disk_store import DiskStore
from sagellm.kv_runtime.disk_store_format import record_bytes
from sagellm.kv_runtime.lent_store import LentStore
from sagellm.kv_runtime.migrator import KVMigrator
from tests.kv_runtime.faulty_store import LIMIT_S, FaultyStore
from tests.kv_runtime.store_contract import BLOCK_BYTES, NUM_BLOCKS, content

SAVE = (Tier.CPU, Tier.NVME)
LOAD = (Tier.NVME, Tier.CPU)


class MemoryStore(LentStore):
    """A `LentStore` that offers room by itself, for `NUM_BLOCKS` blocks."""

    def __init__(self) -> None:
        super().__init__(Tier.CPU, NUM_BLOCKS * BLOCK_BYTES)

    def prepare(self, block: Any, digest: bytes = b"") -> np.ndarray:
        if self.used_bytes() + block.size_bytes > self.capacity_bytes:
            raise StoreFullError("no room on tier cpu; remove a block.")
        if block.key not in self._committed and block.key not in self._prepared:
            self._offered[block.key] = np.empty(block.size_bytes, np.uint8)
        return super().prepare(block, digest)

    def abort(self, key: int) -> None:
        super().abort(key)
        self._offered.pop(key)


class Setup:
    """A host store and one on disk that can be made to fail, and a migrator between them."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.host = FaultyStore(MemoryStore())
        self.disk = FaultyStore(DiskStore(folder, NUM_BLOCKS * record_bytes(BLOCK_BYTES), layout="a model"))
        self.migrator = KVMigrator([self.host, self.disk], **options)

    def move(self, tiers: tuple[Tier, Tier], *keys: int, **options: Any) -> Future[MigrationResult]:
        return self.migrator.migrate(MigrationPlan(*tiers, keys), **options)

    def outcome(self, tiers: tuple[Tier, Tier], *keys: int, **options: Any) -> MigrationResult:
        return self.move(tiers, *keys, **options).result(LIMIT_S)

    def counts(self) -> dict[str, int]:
        return {
            f"{row.src_tier.value}>{row.dst_tier.value} {row.outcome}": row.num_blocks for row in self.migrator.counts()
        }

    def check(self) -> None:
        """Nothing is prepared anywhere, and every block is what its key says."""
        for store, size in ((self.host, BLOCK_BYTES), (self.disk, record_bytes(BLOCK_BYTES))):
            assert store.used_bytes() == len(store) * size
            assert all(np.array_equal(store.store.read(key), content(key)) for key in sorted(store.keys()))


def late(migrator: KVMigrator, plan: MigrationPlan, arrived: threading.Event, **options: Any) -> tuple[Future, Future]:
    """(future, what `on_done` is told) of a move that is late inside a store that hangs, and not before it came there."""
    deadline_s = 0.01
    while True:
        done: Future[MigrationResult] = Future()
        future = migrator.migrate(plan, deadline_s=deadline_s, on_done=done.set_result, **options)
        assert future.result(LIMIT_S) == MigrationResult((), dict.fromkeys(plan.block_ids, "deadline"))
        while not done.done():  # the thread may come there, or out of the move, after the future has ended
            if arrived.wait(0.001):
                return future, done
        deadline_s *= 2  # another process had the core
