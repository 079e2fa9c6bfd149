"""Blocks on tiers: the engine's pool, memory of the host, files; who may hold them, and how their bytes move."""

from sagellm.core.late_imports import late_imports

_HOME = {
    "AllocationResult": "base", "FetchDecision": "base", "KVBackendProtocol": "base", "KVBlockInfo": "base",
    "MigrationPlan": "base", "MigrationResult": "base", "RoomDecision": "base", "TierStore": "base",
    "BlockManager": "blocks", "DiskStore": "disk_store", "HierarchyManager": "hierarchy",
    "KVMigrator": "migrator", "KVPool": "base", "MemoryBackend": "simulated_backend", "QuotaManager": "quota",
    "SimulatedBackend": "simulated_backend",
    "TierSpec": "tier_spec", "TieredBackendProtocol": "base",
}  # fmt: skip

__all__ = sorted(_HOME)

# Books are of use without stores, and stores without books.
__getattr__, __dir__ = late_imports(__name__, _HOME)
