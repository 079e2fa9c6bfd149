"""The native half of sagellm. Use it through the packages: the prefix index is `sagellm.prefix_reuse.PrefixReuseIndex`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm.core.hooks import Tier
from sagellm.prefix_reuse.base import EntryId, Int32Array, LockId, Namespace, RemovalReason

_Tokens = Sequence[int] | NDArray[np.integer[Any]]

class PrefixHit:
    """What a lookup found: the longest cached prefix of the tokens it was given.

    Attributes:
        matched_length: tokens, a multiple of the block size; 0 for a miss.
        remaining_tokens: tokens of the query that were not matched.
        confidence: 1.0 when every matched token was compared; below that when only hashes were.
        kv_block_ids: int32 [matched_length / block_size], read-only; a copy that later changes of the index do not touch.
        tiers: int8 [matched_length / block_size], places in `TIERS`.
        entry_id: of the matched prefix if it ends where an entry does, else 0. A lookup that touches always has one.
        lock: names the lock that `lookup(lock=True)` took, else 0.
    """

    def __init__(
        self,
        *,
        kv_block_ids: _Tokens,
        tiers: Sequence[int] | NDArray[np.int8],
        matched_length: int = 0,
        remaining_tokens: int = 0,
        confidence: float = 1.0,
        entry_id: int = 0,
        lock: int = 0,
    ) -> None: ...
    @property
    def matched_length(self) -> int: ...
    @property
    def remaining_tokens(self) -> int: ...
    @property
    def confidence(self) -> float: ...
    @property
    def kv_block_ids(self) -> Int32Array: ...
    @property
    def tiers(self) -> NDArray[np.int8]: ...
    @property
    def entry_id(self) -> EntryId: ...
    @property
    def lock(self) -> LockId: ...

class PrefixRemoval:
    """Blocks that left the index, in the order they left; a block comes after all that hung below it.

    The caller frees them. `kv_block_ids`: int32 [n], read-only; `tiers`: int8 [n], places in `TIERS`.
    """

    def __init__(self, kv_block_ids: _Tokens, tiers: Sequence[int] | NDArray[np.int8]) -> None: ...
    @property
    def kv_block_ids(self) -> Int32Array: ...
    @property
    def tiers(self) -> NDArray[np.int8]: ...
    def on(self, tier: Tier | str) -> Int32Array:
        """Those of one tier."""

    def __len__(self) -> int: ...

class PrefixEntry:
    """A cached prefix, from its first token to the end of one of its blocks.

    Attributes:
        entry_id: names the prefix; 0 for the empty one. Never given out twice.
        token_hash: 64 bits of the tokens, whatever the namespace; equal in every process (`prefix_hashes`).
        token_length: tokens, a multiple of the block size.
        kv_block_ids: int32 [token_length / block_size], read-only; the blocks that hold it.
        tiers: int8 [token_length / block_size], places in `TIERS`.
        metadata: what `insert` was given for exactly this prefix, else None.
        num_new_blocks: how many blocks the call that returned this added, counted from the end.
        replaced: blocks on slower tiers whose place this insert took, which the caller frees; None if there are none.
    """

    def __init__(
        self,
        *,
        entry_id: int,
        token_hash: int,
        token_length: int,
        kv_block_ids: _Tokens,
        tiers: Sequence[int] | NDArray[np.int8],
        metadata: dict[str, Any] | None = None,
        num_new_blocks: int = 0,
        replaced: PrefixRemoval | None = None,
    ) -> None: ...
    @property
    def entry_id(self) -> EntryId: ...
    @property
    def token_hash(self) -> int: ...
    @property
    def token_length(self) -> int: ...
    @property
    def kv_block_ids(self) -> Int32Array: ...
    @property
    def tiers(self) -> NDArray[np.int8]: ...
    @property
    def metadata(self) -> dict[str, Any] | None: ...
    @property
    def num_new_blocks(self) -> int: ...
    @property
    def replaced(self) -> PrefixRemoval | None: ...

class PrefixIndex:
    """See `sagellm.prefix_reuse.base.PrefixIndex`. Methods with a leading underscore return plain columns."""

    def __init__(self, block_size: int = 16, *, event_capacity: int = 0, _snapshot: bytes | None = None) -> None: ...
    @property
    def block_size(self) -> int: ...
    def insert(
        self,
        tokens: _Tokens,
        kv_block_ids: _Tokens,
        namespace: str | Namespace = "",
        *,
        tier: Tier | str = "gpu",
        metadata: dict[str, Any] | None = None,
    ) -> PrefixEntry: ...
    def extend(
        self, lock: LockId, tokens: _Tokens, kv_block_ids: _Tokens, *, tier: Tier | str = "gpu"
    ) -> PrefixEntry: ...
    def lookup(
        self, tokens: _Tokens, namespace: str | Namespace = "", *, touch: bool = True, lock: bool = False
    ) -> PrefixHit: ...
    def lookup_tiers(self, tokens: _Tokens, namespace: str | Namespace = "") -> list[PrefixHit]: ...
    def unlock(self, lock: LockId) -> None: ...
    def invalidate(
        self,
        tokens: _Tokens | None = None,
        namespace: str | Namespace | None = None,
        *,
        kv_block_ids: _Tokens | None = None,
        tier: Tier | str = "gpu",
        entry_id: EntryId | None = None,
    ) -> PrefixRemoval: ...
    def evict_lru(self, num_blocks: int, tier: Tier | str = "gpu") -> PrefixRemoval: ...
    def evict(
        self, kv_block_ids: _Tokens, tier: Tier | str = "gpu", reason: RemovalReason | str = "policy"
    ) -> PrefixRemoval: ...
    def select_lru(self, num_blocks: int, tier: Tier | str = "gpu") -> Int32Array: ...
    def move(
        self, kv_block_ids: _Tokens, new_ids: _Tokens, src_tier: Tier | str, dst_tier: Tier | str
    ) -> None: ...
    def contains(self, kv_block_ids: _Tokens, tier: Tier | str = "gpu") -> NDArray[np.bool_]: ...
    def entry(self, entry_id: EntryId) -> PrefixEntry: ...
    def tokens(self, entry_id: EntryId) -> Int32Array: ...
    def namespaces(self) -> list[str]: ...
    def num_blocks(self, tier: Tier | str | None = None) -> int: ...
    def clear(self) -> None: ...
    def snapshot(self) -> bytes: ...
    def memory_bytes(self) -> int: ...
    def metrics(self) -> dict[str, Any]: ...
    def check(self) -> None:
        """Raises RuntimeError if the structure is broken. O(everything)."""

    def _blocks(self, tier: Tier | str | None, unlocked: bool) -> tuple[NDArray[Any], ...]: ...
    def _entries(self, namespace: str | Namespace | None) -> list[PrefixEntry]: ...
    def _events(self, after: int) -> tuple[list[tuple[Any, ...]], int, int]: ...

class IndexedPool:
    """See `sagellm.prefix_reuse.ReferenceIndexedPool`. Arguments of methods go by position; the arrays are kept alive.

    Raises:
        PrefixIndexError: as its twin; also for an index that is not native.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        ref_count: NDArray[np.int64],
        access_time: NDArray[np.int64],
        is_cached: NDArray[np.bool_],
        slots: NDArray[np.int64],
        free_ids: NDArray[np.int64],
        free_slots: NDArray[np.int64],
    ) -> None: ...
    def match(
        self,
        tokens: _Tokens,
        num_blocks: int,
        namespace: str | Namespace,
        lock: int,
        table: NDArray[np.int64],
        num_held: int,
        now: int,
        /,
    ) -> tuple[LockId, int, bool]: ...
    def publish(
        self, lock: LockId, tokens: _Tokens, table: NDArray[np.int64], first: int, last: int, /
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]: ...
    def evict_lru(self, num_blocks: int, /) -> NDArray[np.int64]: ...
    def give_back(self, ids: _Tokens, now: int, num_free: int, num_free_slots: int, /) -> int: ...
    def drop_lru(self, num_blocks: int, now: int, num_free: int, num_free_slots: int, /) -> int: ...
    def leave(
        self, lock: int, table: _Tokens, num_blocks: int, now: int, num_free: int, num_free_slots: int, /
    ) -> int: ...

def prefix_hashes(tokens: _Tokens, block_size: int) -> NDArray[np.uint64]:
    """uint64 [len(tokens) // block_size], a hash of each full block's whole prefix; equal in every process."""
