"""Moving KV blocks between memory of the host and files, as an engine's host and disk tiers do."""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.result import Definition
from sagellm.core.hooks import MigrationPlan, Tier
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_runtime.disk_store import DiskStore
from sagellm.kv_runtime.disk_store_format import record_bytes
from sagellm.kv_runtime.lent_store import LentStore
from sagellm.kv_runtime.migrator import KVMigrator

OPTIONS: dict[str, Any] = {"disk_kib": 768, "disk_blocks": 64}
DEFINITIONS = {
    "kv_migration_save_gb_s": Definition(
        unit="GB/s", better="higher",
        text="`disk_blocks` blocks of `disk_kib` KiB from host memory to files in the folder for "
        "temporary files, without `sync`: into the system's cache of pages.",
    ),
    "kv_migration_load_gb_s": Definition(
        unit="GB/s", better="higher",
        text="The same blocks back, checked, from that cache, into memory that was used before.",
    ),
    "kv_migration_open_us_per_block": Definition(
        unit="us", better="lower",
        text="Opening a folder with these blocks, over their number."
    ),
}  # fmt: skip


def run(seed: int, disk_kib: int, disk_blocks: int) -> dict[str, float]:
    return _files(seed, disk_kib << 10, disk_blocks)


def _files(seed: int, block_bytes: int, num_blocks: int) -> dict[str, float]:
    host = LentStore(Tier.CPU, num_blocks * block_bytes)
    memory = np.random.default_rng(seed).integers(0, 256, (num_blocks, block_bytes), np.uint8)
    for key, content in enumerate(memory):
        host.lend(CachedBlock(BlockKey(key), size_bytes=block_bytes), content)
    keys = tuple(range(num_blocks))
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskStore(folder, num_blocks * record_bytes(block_bytes), layout="benchmark")
        migrator = KVMigrator([host, disk], num_threads=1)
        save_s = _seconds(lambda: migrator.migrate(MigrationPlan(Tier.CPU, Tier.NVME, keys)).result())
        for key, content in enumerate(memory):
            host.offer(BlockKey(key), content)
        load = MigrationPlan(Tier.NVME, Tier.CPU, keys)
        load_s = _seconds(lambda: migrator.migrate(load, keep_source=True).result())
        assert len(host) == len(disk) == num_blocks
        migrator.close()
        disk.close()
        start = time.perf_counter()
        disk = DiskStore(folder, num_blocks * record_bytes(block_bytes), layout="benchmark")
        open_s = time.perf_counter() - start
        assert len(disk) == num_blocks
        disk.close()
    total = block_bytes * num_blocks / 1e9
    return {
        "kv_migration_save_gb_s": total / save_s,
        "kv_migration_load_gb_s": total / load_s,
        "kv_migration_open_us_per_block": open_s / num_blocks * 1e6,
    }


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
