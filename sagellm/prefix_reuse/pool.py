"""A prefix index tied to the pool that its blocks come from. `IndexedPool` in plain numpy: what it does, and its oracle."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm.core.errors import PrefixIndexError
from sagellm.prefix_reuse import arguments
from sagellm.prefix_reuse.base import TIERS, LockId, PrefixIndex

BlockIds = NDArray[np.int64]


class ReferenceIndexedPool:
    """Counts who holds each block of a pool: sequences, and the index, which holds one reference on each block it knows.

    The arrays are the pool's own and changed in place. How many entries of a free list are free is the caller's to keep: the
    last ones are, and what is given back goes in front of them.

    Args:
        index: the blocks it knows are ids of the pool; those on the fastest tier lie in the pool's slots.
        ref_count: int64 [blocks].
        access_time: int64 [blocks].
        is_cached: bool [blocks], where the index has its reference.
        slots: int64 [blocks], the slot that holds a block's bytes.
        free_ids: int64 [blocks], a list of ids.
        free_slots: int64 [slots of the pool], a list of slots.

    Raises:
        PrefixIndexError: an invalid array; in calls any bad argument, a block that is not in the pool, and a
            block in the index that is not marked as cached. Nothing is changed then, with two
            exceptions: a `publish` that meets such a block in the index, and a `drop_lru` or `leave` whose blocks are
            rejected. Then the index or the pool is wrong; use neither any more.
    """

    def __init__(
        self, index: PrefixIndex, *, ref_count: BlockIds, access_time: BlockIds, is_cached: NDArray[np.bool_],
        slots: BlockIds, free_ids: BlockIds, free_slots: BlockIds,
    ) -> None:  # fmt: skip
        self._index = index
        self._ref_count = _column(ref_count, np.int64, "ref_count")
        self._access_time = _column(access_time, np.int64, "access_time")
        self._is_cached = _column(is_cached, np.bool_, "is_cached")
        self._slots = _column(slots, np.int64, "slots")
        self._free_ids = _column(free_ids, np.int64, "free_ids")
        self._free_slots = _column(free_slots, np.int64, "free_slots")
        for array in (access_time, is_cached, slots, free_ids):
            if len(array) != len(ref_count):
                raise PrefixIndexError(
                    f"an array has {len(array)} rows and ref_count {len(ref_count)}; each must have one for each block."
                )

    def match(
        self, tokens: Any, num_blocks: int, namespace: str, lock: LockId, table: BlockIds, num_held: int, now: int
    ) -> tuple[LockId, int, bool]:
        """Lock the longest cached prefix of the first `num_blocks` blocks of tokens, in place of `lock` (0: of none).

        The sequence has `num_held` of the blocks already; it gets a reference on each of the others, and their ids from row
        `num_held` of its `table` on. Returns the new lock; how many blocks it holds; whether one of the others lies on a
        slower tier.
        """
        table, now = _column(table, np.int64, "table"), arguments.integer(now, "now")
        num_held, num_tokens = arguments.integer(num_held, "num_held"), self._num_tokens(tokens, num_blocks)
        hit = self._index.lookup(tokens[:num_tokens], namespace, lock=True)
        num_found, blocks = len(hit.kv_block_ids), hit.kv_block_ids[num_held:].astype(np.int64)
        try:
            self._check_ids(blocks)
            if num_found > len(table):
                raise PrefixIndexError(f"the table has room for {len(table)} blocks; found were {num_found}.")
            if not self._is_cached[blocks].all():
                raise PrefixIndexError(
                    f"blocks {blocks[~self._is_cached[blocks]]} are in the index, but is_cached is off."
                )
            if lock:
                self._index.unlock(lock)
        except BaseException:
            self._index.unlock(hit.lock)
            raise
        self._ref_count[blocks] += 1
        self._access_time[blocks] = now
        table[num_held : num_held + len(blocks)] = blocks
        return hit.lock, num_found, bool(hit.tiers[num_held:].any())

    def publish(
        self, lock: LockId, tokens: Any, table: BlockIds, first: int, last: int
    ) -> tuple[BlockIds | None, BlockIds | None]:
        """Cache blocks `first` to `last` of a sequence, of `tokens` and of its `table`; `lock` holds those before them.

        Where another block of the pool holds the same prefix, the table gets that one. Returns the blocks that the table
        gave up for such ones, and those on slower tiers whose place the table's took; None if no block is.
        """
        table = _column(table, np.int64, "table")
        start, end = self._num_tokens(tokens, first), self._num_tokens(tokens, last)
        if not first <= last <= len(table):
            raise PrefixIndexError(f"blocks {first} to {last} of {len(table)}; they must be among them.")
        own = table[first:last].copy()
        self._check_ids(own)
        entry = self._index.extend(lock, tokens[start:end], own)
        cached = entry.kv_block_ids.astype(np.int64)
        self._check_ids(cached)
        # The index's reference on a block that is new there, the sequence's on one that was there.
        self._ref_count[cached] += 1
        self._is_cached[cached] = True
        table[first:last] = cached
        doubles = own[own != cached]
        replaced = None if entry.replaced is None else entry.replaced.kv_block_ids.astype(np.int64)
        return (doubles if len(doubles) else None), replaced

    def evict_lru(self, num_blocks: int) -> BlockIds:
        """`PrefixIndex.evict_lru` of the fastest tier; int64 [n]. They stay as they are until `give_back`."""
        return self._index.evict_lru(num_blocks, TIERS[0]).kv_block_ids.astype(np.int64)

    def give_back(self, ids: BlockIds, now: int, num_free: int, num_free_slots: int) -> int:
        """The index's references on blocks that it does not know any more. Returns how many became free.

        `num_free` and `num_free_slots` entries of the free lists are free until now.
        """
        num_freed = self._take_references(ids, now, num_free, num_free_slots)
        self._is_cached[ids] = False
        return num_freed

    def drop_lru(self, num_blocks: int, now: int, num_free: int, num_free_slots: int) -> int:
        """`evict_lru` and `give_back` in one."""
        return self.give_back(self.evict_lru(num_blocks), now, num_free, num_free_slots)

    def leave(
        self, lock: LockId, table: BlockIds, num_blocks: int, now: int, num_free: int, num_free_slots: int
    ) -> int:
        """A sequence loses its `lock` (0: it has none) and the first `num_blocks` of its table. Returns as `give_back`."""
        if not arguments.integer(num_blocks, "num_blocks") <= len(table):
            raise PrefixIndexError(f"the first {num_blocks} of {len(table)} blocks; they must be among them.")
        if lock:
            self._index.unlock(lock)
        return self._take_references(table[:num_blocks], now, num_free, num_free_slots)

    def _take_references(self, ids: BlockIds, now: int, num_free: int, num_free_slots: int) -> int:
        now = arguments.integer(now, "now")
        num_free = arguments.integer(num_free, "num_free", high=len(self._free_ids))
        num_free_slots = arguments.integer(num_free_slots, "num_free_slots", high=len(self._free_slots))
        ids = arguments.int32_array(ids, "block ids").astype(np.int64)
        self._check_ids(ids)
        ref_count = self._ref_count.copy()
        freed = []
        for block in ids.tolist():
            if ref_count[block] <= 0:
                raise PrefixIndexError(f"block {block} is free already.")
            ref_count[block] -= 1
            if ref_count[block] == 0:
                freed.append(block)
        slots = self._slots[freed]
        if len(slots) and not 0 <= slots.min() <= slots.max() < len(self._free_slots):
            raise PrefixIndexError(f"blocks {freed} lie in slots {slots}, not all of which are slots of the pool.")
        end, end_slot = len(self._free_ids) - num_free, len(self._free_slots) - num_free_slots
        if min(end, end_slot) < len(freed):
            raise PrefixIndexError(f"{len(freed)} blocks to free; only {min(end, end_slot)} are in use.")
        self._ref_count[:] = ref_count
        self._access_time[ids] = now
        self._free_ids[end - len(freed) : end] = freed
        self._free_slots[end_slot - len(freed) : end_slot] = slots
        return len(freed)

    def _num_tokens(self, tokens: Any, num_blocks: int) -> int:
        num_tokens = arguments.integer(num_blocks, "num_blocks") * self._index.block_size
        if num_tokens > len(tokens):
            raise PrefixIndexError(f"the first {num_tokens} of {len(tokens)} tokens; they must be among them.")
        return num_tokens

    def _check_ids(self, ids: BlockIds) -> None:
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self._ref_count):
            raise PrefixIndexError(f"blocks {ids} are not all in the pool; it has {len(self._ref_count)} blocks.")


def _column(array: Any, dtype: Any, name: str) -> NDArray[Any]:
    if isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == 1:
        if array.flags.c_contiguous and array.flags.aligned and array.flags.writeable:
            return array
    raise PrefixIndexError(
        f"{name} must be a one-dimensional contiguous writable array of {np.dtype(dtype)}; it is changed in place."
    )
