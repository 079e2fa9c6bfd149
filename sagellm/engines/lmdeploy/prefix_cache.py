"""Which blocks of LMDeploy's pool hold which tokens: a prefix index, tied to LMDeploy's block allocator.

Between two calls:
- The index knows the blocks marked in `is_cached`, by LMDeploy's logical id and on the tier of their bytes. It holds one
  reference on each in the allocator, as LMDeploy's own trie would.
- Cached blocks of a sequence are the first ones of its table. A lock on this path keeps them in the index.
  So a cached block is locked if and only if the allocator counts more than one reference on it.

A block is published when its keys and values are computed, not when it is scheduled.
"""

from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm.core.hooks import Tier
from sagellm.core.victims import Candidates
from sagellm.prefix_reuse import IndexedPool, PrefixReuseIndex, ReferenceIndexedPool
from sagellm.prefix_reuse.base import TIERS, LockId, PrefixIndex

BlockIds = NDArray[np.int64]
EVENT_CAPACITY = 4096  # where more happen between two messages to the proxy, a snapshot is sent
_NONE_HELD: tuple[LockId, int] = LockId(0), 0


class PrefixCache:
    """Owned by one scheduler. `seq` is LMDeploy's `SchedulerSequence`.

    `enabled` is False where LMDeploy caches no prefixes, and once the index has failed. `has_router`: the index keeps events
    for a proxy that routes by them.
    """

    def __init__(self, scheduler: Any, has_router: bool = False) -> None:
        self._allocator = scheduler.block_manager.allocator
        self._pool = self._allocator.get_phy_allocator("gpu")
        self._pool_slots = scheduler.block_manager.num_gpu_blocks
        self._has_host = scheduler.block_manager.num_cpu_blocks > 0
        self.block_size: int = scheduler.cache_config.block_size
        self.enabled: bool = scheduler.block_trie.enable
        self.index: PrefixIndex | None = None
        if self.enabled:
            self.index = PrefixReuseIndex(block_size=self.block_size, event_capacity=EVENT_CAPACITY if has_router else 0)
        self.is_cached = np.zeros(self._allocator._log_mem.num_blocks(), bool)
        self.tick = count(1).__next__  # the next access time; LMDeploy's own clock counts whole seconds
        self._blocks: IndexedPool | ReferenceIndexedPool | None = self._tie(IndexedPool) if self.enabled else None
        if self.enabled and not self._has_host:
            self._allocator.free = self.free
        self._held: dict[int, tuple[LockId, int]] = {}  # a sequence's lock, and how many of its first blocks that keeps

    def _tie(self, kind: type) -> Any:
        """An indexed pool over LMDeploy's own arrays, none of which it ever replaces by another."""
        memory = self._allocator._log_mem
        return kind(
            self.index, ref_count=memory.ref_count, access_time=memory.access_time, is_cached=self.is_cached,
            slots=memory.phy_map, free_ids=self._allocator._free_blocks, free_slots=self._pool._free_blocks,
        )  # fmt: skip

    # ---- sequences

    def num_held(self, seq: Any) -> int:
        """How many of the sequence's first blocks the index holds."""
        return self._held.get(seq.seq_id, _NONE_HELD)[1]

    def path(self, tokens: np.ndarray, namespace: str) -> BlockIds:
        """int64 [n]: the blocks that hold the beginning of `tokens`. Touches nothing."""
        return self.index.lookup(tokens, namespace, touch=False).kv_block_ids.astype(np.int64)

    def match(self, seq: Any, num_blocks: int) -> tuple[int, bool]:
        """Lock the cached blocks that hold the beginning of a sequence's tokens, at most `num_blocks`, in place of its lock.

        They become its first ones; it has no blocks of its own behind those it holds, or as many as are found. Returns how
        many were found, and whether the bytes of any that it did not hold lie on another tier than the pool.
        """
        lock, num_held = self._held.get(seq.seq_id, _NONE_HELD)
        table = seq.logical_blocks
        if num_blocks > len(table._blocks):
            table.reserve(num_blocks)
        lock, num_found, is_any_away = self._blocks.match(
            seq.history_cache._token_ids, num_blocks, seq.adapter_name or "", lock, table._blocks, num_held, self.tick()
        )
        self._held[seq.seq_id] = lock, num_found
        if num_found > table._num_real:
            table._num_real = num_found
            seq.set_step(num_found * self.block_size)
        return num_found, is_any_away

    def cut(self, seq: Any, num_blocks: int) -> None:
        """Take from a sequence that has cached blocks only all but the first `num_blocks`."""
        self.match(seq, num_blocks)
        self.undo(seq, num_blocks, num_blocks * self.block_size)

    def undo(self, seq: Any, num_blocks: int, step: int) -> None:
        """Take back what a match added to a sequence that had `num_blocks` blocks and `step` tokens done."""
        lost = seq.logical_blocks[num_blocks:].copy()
        if len(lost):
            self._allocator.free(lost)
            seq.logical_blocks.resize(num_blocks)
            seq.set_step(step)

    def publish(self, seq: Any, num_blocks: int) -> BlockIds | None:
        """Cache the first `num_blocks` blocks of a sequence; their keys and values are computed.

        Where another block of the pool holds the same prefix, the sequence takes that one and gives up its own. Where one on
        a slower tier does, the sequence's takes its place. Returns the ids of those, int64 [n], which are the caller's to
        free; None if no block is.
        """
        held = self._held.get(seq.seq_id)
        if held is None:
            self.match(seq, 0)
            held = self._held[seq.seq_id]
        lock, first = held
        tokens, table = seq.history_cache._token_ids, seq.logical_blocks._blocks
        doubles, replaced = self._blocks.publish(lock, tokens, table, first, num_blocks)
        self._held[seq.seq_id] = lock, num_blocks
        if doubles is not None:
            self._allocator.free(doubles)
        return replaced

    def release(self, seq_id: int) -> None:
        """The sequence loses its blocks now. Those that are cached were in use until this moment: they are recent."""
        held = self._held.pop(seq_id, None)
        if held is not None:
            self.index.unlock(held[0])

    def ended(self, seq: Any) -> None:
        """As `release`, and its blocks go back in the same call: LMDeploy, which is about to do that, finds none any more."""
        if self._has_host:
            self.release(seq.seq_id)
            return
        lock, _ = self._held.pop(seq.seq_id, _NONE_HELD)
        table, allocator, pool = seq.logical_blocks, self._allocator, self._pool
        num_freed = self._blocks.leave(
            lock, table._blocks, table._num_real, self.tick(), allocator._free_count, pool._free_count
        )
        allocator._free_count += num_freed
        pool._free_count += num_freed
        table.reset()

    # ---- blocks

    def holds(self, block: int) -> bool:
        """Whether the block may be found. One that is about to be evicted is marked as cached, but not found any more."""
        if not 0 <= block < len(self.is_cached) or not self.is_cached[block]:
            return False
        tier = Tier.GPU if self.on_device(np.array([block]))[0] else Tier.CPU
        return bool(self.index.contains([block], tier)[0])

    def on_device(self, ids: BlockIds) -> NDArray[np.bool_]:
        """bool [n]: whose bytes lie in the pool."""
        return self._allocator.get_physical_blocks(ids) < self._pool_slots

    def unlocked(self) -> NDArray[np.bool_]:
        """bool [blocks]: cached, and held by no request."""
        return self.is_cached & (self._allocator._log_mem.ref_count == 1)

    def candidates(self) -> Candidates:
        """Return every unheld block, on all tiers. O(cached blocks)."""
        rows = self.index.blocks(unlocked=True)
        on_device = rows.tiers == TIERS.index(Tier.GPU)
        arrays = (rows.kv_block_ids, rows.parent_ids, rows.last_access, rows.depth, on_device)
        for array in arrays:
            array.flags.writeable = False
        return Candidates(*arrays)

    def are_candidates(self, ids: BlockIds) -> NDArray[np.bool_]:
        """bool [n]: which of these are cached and unheld. O(ids)."""
        inside = (ids >= 0) & (ids < len(self.is_cached))
        known = np.where(inside, ids, 0)
        return inside & self.is_cached[known] & (self._allocator.get_ref_count(known) == 1)

    def has_candidates(self) -> bool:
        """Whether any block of the pool may be evicted."""
        return len(self.index.select_lru(1, Tier.GPU)) > 0

    def evict_lru(self, num_blocks: int) -> BlockIds:
        """Forget as many blocks of the pool, and what hangs below them on the host; the caller frees what is returned."""
        return self._blocks.evict_lru(num_blocks)

    def drop_lru(self, num_blocks: int) -> int:
        """`evict_lru` and `freed` in one, where there is no host tier; returns how many it were."""
        allocator, pool = self._allocator, self._pool
        num_freed = self._blocks.drop_lru(num_blocks, self.tick(), allocator._free_count, pool._free_count)
        allocator._free_count += num_freed
        pool._free_count += num_freed
        return num_freed

    def evict(self, victims: BlockIds, tier: Tier = Tier.GPU) -> BlockIds:
        """Forget chosen blocks of one tier, every block of it below one of them among them, and what hangs below them on
        other tiers; the caller frees what is returned. Those that the index does not hold any more are passed over.

        Raises:
            PrefixIndexError: a block below a victim is not among them; nothing is changed then.
        """
        victims = victims[self.index.contains(victims, tier)]
        return self.index.evict(victims, tier).kv_block_ids.astype(np.int64)

    def move(self, block: int, src: Tier, dst: Tier) -> None:
        """The bytes are on their way to another tier. The id stays."""
        self.index.move([block], [block], src, dst)

    def freed(self, ids: BlockIds) -> None:
        """Give back the references of blocks that were evicted or replaced."""
        if self._has_host or not self.enabled:  # some of them may not lie in the pool
            self.is_cached[ids] = False
            self._allocator.free(ids)
        else:
            allocator, pool = self._allocator, self._pool
            num_freed = self._blocks.give_back(ids, self.tick(), allocator._free_count, pool._free_count)
            allocator._free_count += num_freed
            pool._free_count += num_freed

    def free(self, ids: BlockIds) -> None:
        """In place of the allocator's own `free`, which does the same in ten times the time."""
        allocator, pool = self._allocator, self._pool
        if len(ids) == 0:
            return
        try:
            num_freed = self._blocks.leave(
                LockId(0), ids, len(ids), self.tick(), allocator._free_count, pool._free_count
            )
        except Exception:  # blocks that are free already, say: nothing was changed, and the allocator's own accepts them
            type(allocator).free(allocator, ids)
            return
        allocator._free_count += num_freed
        pool._free_count += num_freed

    def disable(self) -> None:
        """The index is not to be asked any more. The blocks that are still marked as cached are the caller's to free."""
        self.enabled = False
        self._held.clear()

    def metrics(self) -> dict[str, Any]:
        return self.index.metrics() if self.enabled else {}


def namespace_of(seq: Any) -> str:
    return seq.adapter_name or ""


def num_shareable(seq: Any) -> int:
    """Tokens up to the first image or other embedding: the keys and values after it depend on more than tokens."""
    if not seq.history_embeddings.embeddings and not seq.history_multimodals.multimodals:
        return seq.num_valid_ids
    starts = [each.start for each in seq.history_embeddings.embeddings]
    starts += [each.start for group in seq.history_multimodals.multimodals.values() for each in group]
    return min(starts, default=seq.num_valid_ids)
