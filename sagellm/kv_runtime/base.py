"""The contract of the KV runtime: blocks on tiers, who may have them, and how their bytes move.

Two halves that meet in `HierarchyManager`. The *books* say which block is where, who holds it and who owns it; they decide,
run the same in the engine and in a replay, and touch no bytes. The *stores* hold bytes: pool memory, files. A `KVMigrator`
copies between stores. A `KVBackendProtocol` is the pool whose blocks these are: LMDeploy's, or a simulated one.

Tiers, fastest first: gpu is the engine's own pool (also when a CPU device has it), cpu is memory of the host, nvme is files.
A block is on gpu or on cpu, not on both; a file of it may stay on nvme beside that, since its content cannot change.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sagellm.core.errors import CapacityError, TierError
from sagellm.core.hooks import AllocationResult, KVBlockInfo, MigrationPlan, MigrationResult, RequestId, Tier
from sagellm.kv_policy.base import BlockKey, CachedBlock

__all__ = [
    "AllocationResult", "BlockBytes", "BlockKey", "CachedBlock", "FetchDecision", "KVBackendProtocol", "KVBlockInfo", "KVPool",
    "MigrationPlan", "MigrationResult", "RequestId", "RoomDecision", "StoreFullError", "StoredBlock", "Tier",
    "TierStore", "TieredBackendProtocol",
]  # fmt: skip

BlockBytes = NDArray[np.uint8]  # [size_bytes of the block], contiguous


class StoreFullError(TierError, CapacityError):
    """A store has no room for a block; what it holds is untouched, and it takes blocks again once some were removed."""


class StoredBlock(NamedTuple):
    """A block in a store. `digest`: 16 bytes, of the namespace and of every token from the start of the sequence to the
    block's end; b"" where the writer did not say. It is what tells two blocks apart whose 64-bit keys collide."""

    block: CachedBlock
    digest: bytes = b""


class RoomDecision(NamedTuple):
    """How to make room on a tier.

    Attributes:
        demote: moves to slower tiers, to be made in this order, the slowest tiers first.
        drop: (tier, key, reason) of blocks that are dropped, in this order and before the moves.
        victims: (key, reason) of the blocks that leave the tier that was asked for, moved or dropped, in the policy's order.
    """

    demote: tuple[MigrationPlan, ...]
    drop: tuple[tuple[Tier, BlockKey, str], ...]
    victims: tuple[tuple[BlockKey, str], ...]


class FetchDecision(NamedTuple):
    """Blocks of a prefix to bring to gpu: the first `len(keys)` after the `num_resident` that are there.

    `tiers`: where each lies now; `net_benefit_s`: seconds saved against computing them; `reason` also says why not more.
    """

    keys: tuple[BlockKey, ...]
    tiers: tuple[Tier, ...]
    net_benefit_s: float
    reason: str


class KVPool(Protocol):
    """A pool that gives blocks out: LMDeploy's (`engines.lmdeploy.pool_backend.LMDeployPool`).

    A plug-in reaches it through `EngineHandle.allocate_blocks`, `free_blocks`, `get_utilization` and `get_fragmentation`.
    """

    def allocate(self, count: int, owner: str = "") -> AllocationResult:
        """Reserve free blocks for the owner. Raises CapacityError: fewer are free; nothing was reserved."""
        ...

    def free(self, block_ids: Sequence[int], owner: str = "") -> None:
        """Give reserved blocks back. Raises PluginError: one that the owner did not reserve; nothing was freed."""
        ...

    def get_utilization(self) -> float:
        """Return the share of blocks that are not free, 0 to 1."""
        ...

    def get_fragmentation(self) -> float:
        """Return the share of token slots in allocated blocks that hold no token, 0 to 1."""
        ...


class KVBackendProtocol(Protocol):
    """A pool of blocks: LMDeploy's (`engines.lmdeploy.pool_backend.LMDeployPool`), or a simulated one.

    Blocks are named by the integer that the backend knows them by: a key, or LMDeploy's block id. Every call returns at once.
    """

    block_size: int
    block_bytes: int

    def capacity(self, tier: Tier) -> int:
        """Return the number of blocks; 0 where the tier does not exist."""
        ...

    def num_free(self, tier: Tier) -> int: ...

    def migrate(self, plan: MigrationPlan) -> MigrationResult:
        """Move blocks between gpu and cpu; refused ones stay where they are."""
        ...

    def drop(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """Forget blocks of the tier; the room is free when this returns."""
        ...


class TieredBackendProtocol(KVBackendProtocol, Protocol):
    """A backend that also copies blocks to files and back; what takes time is a future, which ends on any thread."""

    def save(self, keys: Sequence[BlockKey], tier: Tier, deadline_s: float) -> Future[MigrationResult]:
        """Write copies of blocks to a slower tier; they stay where they are and must not move until the future has ended.

        Not moved in time, or failed, means refused, with the reason: no half-written copy can be found.
        """
        ...

    def load(self, keys: Sequence[BlockKey], tier: Tier, deadline_s: float) -> Future[MigrationResult]:
        """Read blocks of a slower tier into free room of a faster one. The copies there are found once the future has ended
        and `commit_loads` was called; those that are refused were missing, torn, corrupt or late, and have left no trace."""
        ...

    def commit_loads(self) -> tuple[BlockKey, ...]:
        """Make what was loaded since the last call part of the prefix cache; called where blocks may change hands."""
        ...


class TierStore(Protocol):
    """Holds the bytes of blocks by key. Thread-safe. Writing is in two phases: `prepare`, fill, then `commit` or `abort`.

    Prepared blocks cannot be found; committed ones are whole. Raises TierError when read-only, broken or closed, and for
    a key that is there, or on its way, already; StoreFullError, which is one, when full.

    `capacity_bytes` may fall where a medium turns out to hold less (`DiskStore`).
    """

    tier: Tier
    capacity_bytes: int

    def prepare(self, block: CachedBlock, digest: bytes = b"") -> BlockBytes:
        """Writable room for the block's bytes [size_bytes], held for the caller until `commit` or `abort`."""
        ...

    def commit(self, key: BlockKey) -> None:
        """The block can be found from now on. One that raises TierError has aborted. KeyError: not prepared."""
        ...

    def abort(self, key: BlockKey) -> None:
        """Raises KeyError: not prepared."""
        ...

    def read(self, key: BlockKey, into: BlockBytes | None = None, digest: bytes = b"") -> BlockBytes:
        """A copy of the block's bytes, checked where the medium can lose them. `into` [size_bytes] is filled and returned;
        its content means nothing after an error.

        Raises:
            KeyError: not committed here, or under another digest than the one given.
            TierError: torn, corrupt or unreadable; such a block is dropped.
        """
        ...

    def describe(self, key: BlockKey) -> StoredBlock:
        """Raises KeyError: not committed here."""
        ...

    def remove(self, key: BlockKey) -> None:
        """Raises KeyError: not committed here."""
        ...

    def __contains__(self, key: BlockKey) -> bool: ...

    def __len__(self) -> int: ...

    def keys(self) -> list[BlockKey]: ...

    def used_bytes(self) -> int:
        """Bytes of committed and prepared blocks; never above `capacity_bytes`."""
        ...

    def close(self) -> None:
        """Prepared blocks are aborted. A second call does nothing."""
        ...
