"""The contract of a prefix index: which KV blocks hold the beginning of a token sequence.

Terms. A *block* is `block_size` tokens whose keys and values lie in one KV block of the engine. A cached block is found by
its namespace and every token from the start of the sequence to its end, compared one by one. The blocks of a namespace form
a tree, a block hanging below the one that holds the tokens before it. A block lives on one tier; `(tier, kv_block_id)` names
at most one cached block.

Recency. Each `insert`, `extend`, `lookup` that touches and `unlock` takes the next tick of a counter and stamps every block
of its path with it, so no block is older than one below it. Eviction takes the block with the lowest stamp that is not
locked; of equal stamps the deepest.

Results. `PrefixEntry`, `PrefixHit` and `PrefixRemoval` are native classes, described in `_core.pyi`. An entry is a prefix
that ends where a node of the index does. Its id becomes unknown when its last block is removed, and may when it is
continued or cut. In one index object it never names another prefix.

Removal. A block without the one above it can never be found, so removing a block removes all below it, on any tier. A locked
block, and so every block above it, is never removed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, NewType, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sagellm._core import PrefixEntry, PrefixHit, PrefixRemoval
from sagellm.core.config import MAX_CACHED_BLOCK_SIZE
from sagellm.core.hooks import Tier

__all__ = [
    "MAX_BLOCK_SIZE", "TIERS", "CachedBlocks", "EntryId", "Int32Array", "LockId", "Namespace", "PrefixEntry", "PrefixEvent",
    "PrefixEventKind", "PrefixEvents", "PrefixHit", "PrefixIndex", "PrefixRemoval", "RemovalReason", "Tier",
]  # fmt: skip

EntryId = NewType("EntryId", int)
LockId = NewType("LockId", int)
Int32Array: TypeAlias = NDArray[np.int32]

TIERS = (Tier.GPU, Tier.CPU, Tier.NVME)  # fastest first; an array of tiers holds places in this tuple
MAX_BLOCK_SIZE = MAX_CACHED_BLOCK_SIZE


class RemovalReason(str, Enum):
    EVICTED = "evicted"  # least recently used
    POLICY = "policy"  # a policy named it
    INVALIDATED = "invalidated"  # the caller said that its content no longer holds
    ORPHANED = "orphaned"  # the block above it was removed
    REPLACED = "replaced"  # the same tokens were inserted on a faster tier; listeners see it as a move


class PrefixEventKind(str, Enum):
    STORED = "stored"
    REMOVED = "removed"
    MOVED = "moved"
    CLEARED = "cleared"


class Namespace(NamedTuple):
    """The properties that requests must have in common to share KV. A plain string is a namespace too."""

    adapter: str = ""
    tenant: str = ""
    model: str = ""

    @property
    def key(self) -> str:
        """One string; different namespaces have different ones, and `Namespace()` has the empty one."""
        if not any(self):
            return ""
        return "".join(f"{len(part)}:{part}" for part in self)


class CachedBlocks(NamedTuple):
    """Cached blocks, one row each, in no particular order; arrays of length n.

    Attributes:
        kv_block_ids: int64.
        tiers: int8, places in `TIERS`.
        parent_ids: int64, the block above; -1 at the top, or if it is not in these rows.
        last_access: int64, stamps; larger is more recent.
        depth: int64, tokens of the prefix up to and including the block.
        num_locks: int64, locks that hold the block.
    """

    kv_block_ids: NDArray[np.int64]
    tiers: NDArray[np.int8]
    parent_ids: NDArray[np.int64]
    last_access: NDArray[np.int64]
    depth: NDArray[np.int64]
    num_locks: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixEvent:
    """A change of the index. Events are numbered from 1 without a gap.

    Attributes:
        sequence: the event's number.
        kind: what happened; the fields below that it does not use are empty.
        namespace: key of the namespace.
        tier: the medium on which the blocks lie now (stored, moved) or lay (removed).
        kv_block_ids: int32 [n], from the top down (stored, moved); in the order they left (removed).
        token_ids: int32 [n * block_size] (stored).
        parent: (tier, block id) of the block above the first one; None at the top (stored).
        block_hashes: uint64 [n], of the prefix up to each block's end (stored, removed).
        src_tier, src_block_ids: where the blocks were (moved).
        reason: why (removed).
        last_access: the stamp of the blocks (stored).
    """

    sequence: int
    kind: PrefixEventKind
    namespace: str = ""
    tier: Tier = Tier.GPU
    kv_block_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    token_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    parent: tuple[Tier, int] | None = None
    block_hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    src_tier: Tier | None = None
    src_block_ids: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    reason: RemovalReason | None = None
    last_access: int = 0


class PrefixEvents(NamedTuple):
    """Events after a given number. `num_lost` of them are gone: the listener must start again from a snapshot."""

    events: tuple[PrefixEvent, ...]
    num_lost: int
    last_sequence: int


class PrefixIndex(Protocol):
    """Thread-safe: any number of threads may look up while one changes the index; each call is atomic.

    Tokens are a one-dimensional array of integers, 0 to 2**31 - 1; contiguous int32 is used in place, anything else is
    converted. Block ids are 0 to 2**31 - 1 and should be dense: tables have a page for each 16,384 ids of which one was used.

    Raises:
        PrefixIndexError: every bad argument, with nothing changed (a lookup of tokens that nothing can hold may be a miss
            instead). Subclasses: `LockError` for a lock that is unknown or was released, or a removal of locked blocks;
            `BlockReuseError` for a block id that is cached elsewhere.
    """

    block_size: int

    def insert(
        self,
        tokens: Sequence[int] | Int32Array,
        kv_block_ids: Sequence[int] | Int32Array,
        namespace: str | Namespace = "",
        *,
        tier: Tier | str = Tier.GPU,
        metadata: dict[str, Any] | None = None,
    ) -> PrefixEntry:
        """Cache the full blocks of `tokens`; a last part that fills no block is left out.

        `kv_block_ids` has one id for each full block, or one more for the last part, which is left out too. Where a block
        with the same prefix is cached on this tier or a faster one, that one stays and the entry names it, so a caller
        compares `entry.kv_block_ids` with its own to find duplicates. One on a slower tier is replaced.

        `metadata` must be writable as JSON.
        """
        ...

    def extend(
        self, lock: LockId, tokens: Sequence[int] | Int32Array, kv_block_ids: Sequence[int] | Int32Array,
        *, tier: Tier | str = Tier.GPU,
    ) -> PrefixEntry:  # fmt: skip
        """As `insert`, of the tokens that follow the prefix a lock holds; the lock then holds the longer prefix.

        The entry returned is that of the whole prefix, but its `kv_block_ids` and `tiers` have only the rows of this call.
        O(tokens given), whatever the length before them.
        """
        ...

    def lookup(
        self, tokens: Sequence[int] | Int32Array, namespace: str | Namespace = "", *, touch: bool = True, lock: bool = False
    ) -> PrefixHit:
        """The longest cached prefix of `tokens`, on whatever tiers its blocks lie.

        `lock` keeps the matched path in the index until `unlock(hit.lock)`, also when nothing matched.
        """
        ...

    def lookup_tiers(self, tokens: Sequence[int] | Int32Array, namespace: str | Namespace = "") -> list[PrefixHit]:
        """Candidates, longest first: the longest prefix that lies on the fastest tier alone, on the two fastest, on all;
        each only if it is longer than the one before. Touches nothing. Empty for a miss."""
        ...

    def unlock(self, lock: LockId) -> None: ...

    def invalidate(
        self,
        tokens: Sequence[int] | Int32Array | None = None,
        namespace: str | Namespace | None = None,
        *,
        kv_block_ids: Sequence[int] | Int32Array | None = None,
        tier: Tier | str = Tier.GPU,
        entry_id: EntryId | None = None,
    ) -> PrefixRemoval:
        """Forget one of: a sequence, an entry, given blocks, a namespace, everything (no argument).

        A sequence whose full blocks are all cached (or an entry) goes with all that continues it. Then the blocks above
        it go, up to the first that another sequence continues from, that a lock holds or that an entry with metadata
        ends at. The cached part of a sequence goes by the same rule from its last block up,
        and stays whole if something continues it. Given blocks go with all that is below them; ids that
        are not cached are passed over. Raises LockError, and removes nothing, if a block to be removed is locked.
        """
        ...

    def evict_lru(self, num_blocks: int, tier: Tier | str = Tier.GPU) -> PrefixRemoval:
        """Remove `num_blocks` blocks of a tier, or as many as are not locked; with them what hangs below on other tiers."""
        ...

    def evict(
        self, kv_block_ids: Sequence[int] | Int32Array, tier: Tier | str = Tier.GPU,
        reason: RemovalReason = RemovalReason.POLICY,
    ) -> PrefixRemoval:  # fmt: skip
        """Remove these blocks, in a policy's order where the tree allows it.

        Every block of the same tier below one of them must be among them; those on other tiers go with them.
        """
        ...

    def select_lru(self, num_blocks: int, tier: Tier | str = Tier.GPU) -> Int32Array:
        """Return the blocks of this tier that `evict_lru` would remove, in that order. Changes nothing."""
        ...

    def move(
        self, kv_block_ids: Sequence[int] | Int32Array, new_ids: Sequence[int] | Int32Array,
        src_tier: Tier | str, dst_tier: Tier | str,
    ) -> None:  # fmt: skip
        """The bytes of these blocks now lie elsewhere. Neither recency nor locks change; a locked block may move.

        All move at once: within one tier they may trade ids. Any other new id must be free on `dst_tier`.
        """
        ...

    def blocks(self, tier: Tier | str | None = None, *, unlocked: bool = False) -> CachedBlocks:
        """Every cached block; of one tier; that nothing locks."""
        ...

    def contains(self, kv_block_ids: Sequence[int] | Int32Array, tier: Tier | str = Tier.GPU) -> NDArray[np.bool_]:
        """bool [n]: which of these blocks are cached."""
        ...

    def entry(self, entry_id: EntryId) -> PrefixEntry:
        """Raises PrefixIndexError if it is no longer cached."""
        ...

    def tokens(self, entry_id: EntryId) -> Int32Array:
        """int32 [token_length] of an entry. Raises as `entry`."""
        ...

    def entries(self, namespace: str | Namespace | None = None) -> Iterator[PrefixEntry]:
        """The longest prefixes, those that nothing continues, of one namespace or all."""
        ...

    def namespaces(self) -> list[str]:
        """Keys of the namespaces that hold blocks."""
        ...

    def num_blocks(self, tier: Tier | str | None = None) -> int: ...

    def clear(self) -> None:
        """Forget every block and every lock: the pool they lay in is gone."""
        ...

    def events(self, after: int = 0) -> PrefixEvents:
        """Events later than number `after`, as far as they are still kept (`event_capacity`)."""
        ...

    def snapshot(self) -> bytes:
        """The whole index but its locks: blocks, stamps, metadata, number of the last event."""
        ...

    def memory_bytes(self) -> int: ...

    def metrics(self) -> dict[str, Any]:
        """Counters since construction, as `PrefixReuseMetrics.from_counters` takes them."""
        ...
