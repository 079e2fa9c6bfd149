"""Blocks on tiers: the engine's pool, memory of the host, files; who may hold them, and how their bytes move."""

from importlib import import_module
from typing import Any

_HOME = {
    "AllocationResult": "base", "FetchDecision": "base", "KVBackendProtocol": "base", "KVBlockInfo": "base",
    "MigrationPlan": "base", "MigrationResult": "base", "RoomDecision": "base", "TierStore": "base",
    "BlockManager": "blocks", "DiskStore": "disk_store", "HierarchyManager": "hierarchy", "HostStore": "host_store",
    "KVMigrator": "migrator", "KVPool": "pool", "MemoryBackend": "memory_backend", "QuotaManager": "quota",
    "TierSpec": "tier_spec",
}  # fmt: skip

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    # Books are of use without stores, and stores without books: each module is imported when it is asked for.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
