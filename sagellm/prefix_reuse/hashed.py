"""A prefix index that keeps hashes in place of tokens, as a router or a tier on disk does."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from sagellm._core import prefix_hashes
from sagellm.core.errors import PrefixIndexError
from sagellm.core.hooks import Tier
from sagellm.prefix_reuse import arguments
from sagellm.prefix_reuse.base import (
    EntryId,
    Int32Array,
    LockId,
    Namespace,
    PrefixEntry,
    PrefixHit,
    PrefixIndex,
    PrefixRemoval,
)
from sagellm.prefix_reuse.matcher import PrefixMatcher

TOKEN_BITS = 31  # a token is a positive int32
USABLE_BITS = 2 * TOKEN_BITS


class HashedPrefixIndex:
    """Finds prefixes by hash alone, in 8 bytes a block whatever the block size. Thread-safe as the index below it.

    It is a `PrefixIndex` of blocks of two tokens, which together are the prefix hash of the true block. Tokens are not
    negative, so 62 bits of the 64 are kept.

    Attributes:
        block_size: tokens a block, 1 to 256.
        hash_bits: bits of each hash that are kept, 1 to 62. Few make collisions likely: for tests.
        matcher: counts what `verify` saw, collisions among it.
    """

    def __init__(self, block_size: int = 16, hash_bits: int = 64, *, index: PrefixIndex | None = None) -> None:
        """`hash_bits`: 1 to 64; more than 62 are 62. `index`: an empty one of block size 2; by default a new
        `PrefixReuseIndex`."""
        self.block_size = arguments.block_size(block_size)
        self.hash_bits = min(arguments.integer(hash_bits, "hash_bits", 1, 64), USABLE_BITS)
        self.matcher = PrefixMatcher(block_size, self.hash_bits)
        self._index = _new_index() if index is None else index
        if self._index.block_size != 2 or self._index.num_blocks():
            raise PrefixIndexError(
                f"the index below must be empty and of block size 2, got block size {self._index.block_size} with "
                f"{self._index.num_blocks()} blocks; make a new one."
            )

    def insert(
        self, tokens: Sequence[int] | Int32Array, kv_block_ids: Sequence[int] | Int32Array,
        namespace: str | Namespace = "", *, tier: Tier | str = Tier.GPU,
    ) -> PrefixEntry:  # fmt: skip
        """As `PrefixIndex.insert`. Where another prefix with the same hash is cached, that one stays, and the entry names
        its blocks."""
        values = arguments.int32_array(tokens, "tokens")
        ids = arguments.int32_array(kv_block_ids, "kv_block_ids")
        full, rest = divmod(len(values), self.block_size)
        if len(ids) not in (full, full + bool(rest)):
            raise PrefixIndexError(
                f"got {len(ids)} kv_block_ids for {len(values)} tokens in blocks of {self.block_size}; give one for each "
                "full block, and one for the rest or none."
            )
        inner = self._inner(values)
        return self._outer(self._index.insert(inner, ids[:full], namespace, tier=tier), inner)

    def lookup(
        self, tokens: Sequence[int] | Int32Array, namespace: str | Namespace = "", *, lock: bool = False
    ) -> PrefixHit:
        """The longest prefix whose hash is cached; touches it.

        `confidence` is a lower bound of the chance that tokens of which nothing is cached would not have matched. Each of n
        cached blocks takes a block of such a query for its own with a chance of 2**-hash_bits, so it is 1 - n *
        2**-hash_bits or 0.0, and never 1.0 for a hit. A miss is sure.
        """
        values = arguments.int32_array(tokens, "tokens")
        hit = self._index.lookup(self._inner(values), namespace, lock=lock)
        matched = len(hit.kv_block_ids) * self.block_size
        return PrefixHit(
            matched_length=matched, remaining_tokens=len(values) - matched,
            confidence=self._confidence() if matched else 1.0, kv_block_ids=hit.kv_block_ids, tiers=hit.tiers,
            entry_id=hit.entry_id, lock=hit.lock,
        )  # fmt: skip

    def verify(
        self,
        hit: PrefixHit,
        tokens: Sequence[int] | Int32Array,
        read_tokens: Callable[[PrefixHit], Sequence[int] | None],
    ) -> bool:
        """Whether the blocks of a hit hold the first `hit.matched_length` of `tokens`.

        `read_tokens(hit)` returns the tokens that these blocks were written for, from where they lie; None if that is not
        known, and then the hash decides once more. A prefix that has left the index since holds nothing.
        """
        try:
            entry = self.entry(hit.entry_id)
        except PrefixIndexError:
            return False
        return self.matcher.verify(tokens, entry, read_tokens(hit))

    def entry(self, entry_id: EntryId) -> PrefixEntry:
        """`token_hash` has the bits that are kept. Raises PrefixIndexError if the prefix is no longer cached."""
        return self._outer(self._index.entry(entry_id), self._index.tokens(entry_id))

    def unlock(self, lock: LockId) -> None:
        self._index.unlock(lock)

    def invalidate(
        self, *, kv_block_ids: Sequence[int] | Int32Array | None = None, tier: Tier | str = Tier.GPU,
        entry_id: EntryId | None = None, namespace: str | Namespace | None = None,
    ) -> PrefixRemoval:  # fmt: skip
        """As `PrefixIndex.invalidate`, but not by tokens: a collision would forget another's blocks."""
        return self._index.invalidate(None, namespace, kv_block_ids=kv_block_ids, tier=tier, entry_id=entry_id)

    def evict_lru(self, num_blocks: int, tier: Tier | str = Tier.GPU) -> PrefixRemoval:
        return self._index.evict_lru(num_blocks, tier)

    def num_blocks(self, tier: Tier | str | None = None) -> int:
        return self._index.num_blocks(tier)

    def memory_bytes(self) -> int:
        return self._index.memory_bytes()

    def _inner(self, tokens: Int32Array) -> Int32Array:
        """int32 [2 * full blocks]: low and high half of each block's hash."""
        hashes = prefix_hashes(tokens, self.block_size) & np.uint64(2**self.hash_bits - 1)
        halves = np.stack([hashes & np.uint64(2**TOKEN_BITS - 1), hashes >> np.uint64(TOKEN_BITS)], axis=1)
        return halves.astype(np.int32).ravel()

    def _outer(self, entry: PrefixEntry, inner: Int32Array) -> PrefixEntry:
        low, high = inner[-2:].tolist() if len(inner) else (0, 0)
        return PrefixEntry(
            entry_id=entry.entry_id, token_hash=low | high << TOKEN_BITS,
            token_length=entry.token_length // 2 * self.block_size, kv_block_ids=entry.kv_block_ids, tiers=entry.tiers,
            num_new_blocks=entry.num_new_blocks, replaced=entry.replaced,
        )  # fmt: skip

    def _confidence(self) -> float:
        return min(max(0.0, 1.0 - self._index.num_blocks() * 2.0**-self.hash_bits), math.nextafter(1.0, 0.0))


def _new_index() -> PrefixIndex:
    from sagellm.prefix_reuse.native import PrefixReuseIndex

    return PrefixReuseIndex(2)
