"""Moving KV blocks between stores: the copies of `KVMigrator` against plain copies of the same memory, and files."""

import ctypes
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from benchmarks.result import Definition
from sagellm.core.hooks import MigrationPlan, Tier
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_runtime.disk_store import DiskStore
from sagellm.kv_runtime.disk_store_format import record_bytes
from sagellm.kv_runtime.host_store import HostStore
from sagellm.kv_runtime.migrator import KVMigrator
from sagellm.kv_runtime.pool import KVPool

OPTIONS: dict[str, Any] = {"mib": [1, 4, 16, 64], "total_mib": 64, "rounds": 30, "disk_kib": 768, "disk_blocks": 64}
SIZES = (1, 4, 16, 64)
DEFINITIONS = {
    f"kv_migration_{name}_{size}mib": Definition(unit=unit, better=better, text=text.format(size=size))
    for size in SIZES
    for name, unit, better, text in (
        (
            "share", "1", "higher",
            "Bandwidth of a plan of {size} MiB blocks, `total_mib` in all, moved by `KVMigrator` from one host store to "
            "another, from the call to the end of its future, over that of `memmove` on the same slots in the calling "
            "thread; the best of twice `rounds` of each: on a shared machine the rest tells who had the cores.",
        ),
        (
            "median_share", "1", "higher",
            "The same as the median of the rounds: of each round's `memmove` over its plan, which follow each other in random "
            "order, so that whoever had the cores had them from both.",
        ),
        ("single_share", "1", "higher", "The share where each block of {size} MiB is a plan of its own, waited for."),
        ("memmove_gb_s", "GB/s", None, "`memmove` of {size} MiB blocks between the two pools, at best."),
        ("copyto_gb_s", "GB/s", None, "`numpy.copyto` of the same."),
    )
} | {
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
MIB = 1 << 20


def run(seed: int, mib: list[int], total_mib: int, rounds: int, disk_kib: int, disk_blocks: int) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for size in SIZES:
        num_bytes = size * MIB if size in mib else 4096
        num_blocks = max(1, total_mib // size) if size in mib else 1
        metrics |= _copies(seed, size, num_bytes, num_blocks, rounds)
    return metrics | _files(seed, disk_kib << 10, disk_blocks)


def _copies(seed: int, size: int, block_bytes: int, num_blocks: int, rounds: int) -> dict[str, float]:
    """Blocks go to and fro between two pools; every contestant copies between the same slots."""
    pools = [KVPool(num_blocks, block_bytes, tier) for tier in (Tier.CPU, Tier.NVME)]
    stores = [HostStore(pool) for pool in pools]
    for key in range(num_blocks):
        stores[0].prepare(CachedBlock(BlockKey(key), size_bytes=block_bytes))[:] = key % 251
        stores[0].commit(BlockKey(key))
    other = [pools[1].view(slot) for slot in pools[1].allocate(num_blocks).block_ids]
    own = [pools[0].view(slot) for slot in range(num_blocks)]
    for view in other:
        view[:] = 0  # so that no contestant is the first to touch the memory
    pools[1].free(range(num_blocks))
    migrator = KVMigrator(stores)
    keys = tuple(range(num_blocks))
    tiers = [Tier.CPU, Tier.NVME]

    def move(plans: list[tuple[int, ...]]) -> None:
        for plan in plans:
            done: Future = migrator.migrate(MigrationPlan(tiers[0], tiers[1], plan))
            assert len(done.result().moved) == len(plan)
        tiers.reverse()

    def memmove() -> None:
        for target, source in zip(other, own, strict=True):
            ctypes.memmove(target.ctypes.data, source.ctypes.data, block_bytes)

    def copyto() -> None:
        for target, source in zip(other, own, strict=True):
            np.copyto(target, source)

    contestants: list[Callable[[], None]] = [
        memmove,
        copyto,
        lambda: move([keys]),
        lambda: move([(key,) for key in keys]),
    ]
    seconds: list[list[float]] = [[] for _ in contestants]
    random = np.random.default_rng(seed)
    for _ in range(2 * rounds):  # an even number, so that blocks end where they began
        # In random order: a contestant that sleeps gets a core sooner afterwards, and so does the next one.
        for place in random.permutation(len(contestants)):
            seconds[place].append(_seconds(contestants[place]))
    migrator.close()
    plain, numpy_s, moved, single = map(min, seconds)
    total = block_bytes * num_blocks / 1e9
    return {
        f"kv_migration_share_{size}mib": plain / moved,
        f"kv_migration_median_share_{size}mib": float(np.median(np.divide(seconds[0], seconds[2]))),
        f"kv_migration_single_share_{size}mib": plain / single,
        f"kv_migration_memmove_gb_s_{size}mib": total / plain,
        f"kv_migration_copyto_gb_s_{size}mib": total / numpy_s,
    }


def _files(seed: int, block_bytes: int, num_blocks: int) -> dict[str, float]:
    host = HostStore(KVPool(num_blocks, block_bytes))
    random = np.random.default_rng(seed)
    for key in range(num_blocks):
        host.prepare(CachedBlock(BlockKey(key), size_bytes=block_bytes))[:] = random.integers(
            0, 256, block_bytes, np.uint8
        )
        host.commit(BlockKey(key))
    keys = tuple(range(num_blocks))
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskStore(folder, num_blocks * record_bytes(block_bytes), layout="benchmark")
        migrator = KVMigrator([host, disk], num_threads=1)
        save_s = _seconds(lambda: migrator.migrate(MigrationPlan(Tier.CPU, Tier.NVME, keys)).result())
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
