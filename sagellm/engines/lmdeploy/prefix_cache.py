"""Which blocks of LMDeploy's pool hold which tokens: a prefix index, tied to LMDeploy's block allocator.

Between two calls:
- the index knows the blocks marked in `is_cached`, by LMDeploy's logical id and on the tier where their bytes lie, and
  holds one reference on each of them in the allocator, as LMDeploy's own trie would;
- of a sequence that holds cached blocks these are the first ones of its table, and a lock on just this path keeps them in
  the index. So a cached block is locked if and only if the allocator counts more than one reference on it.

A block is published when its keys and values are computed, not when it is scheduled.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm.core.hooks import Tier, VictimRequest
from sagellm.prefix_reuse import PrefixReuseIndex
from sagellm.prefix_reuse.base import TIERS, LockId, PrefixIndex

BlockIds = NDArray[np.int64]


@dataclass(slots=True)
class _Held:
    """`num_blocks`: how many of a sequence's first blocks its lock keeps in the index."""

    lock: LockId
    num_blocks: int


class PrefixCache:
    """Owned by one scheduler. `seq` is LMDeploy's `SchedulerSequence`.

    `enabled` is False where LMDeploy caches no prefixes, and once the index has failed.
    """

    def __init__(self, scheduler: Any) -> None:
        self._allocator = scheduler.block_manager.allocator
        self._pool_slots = scheduler.block_manager.num_gpu_blocks
        self._has_host = scheduler.block_manager.num_cpu_blocks > 0
        self.block_size: int = scheduler.cache_config.block_size
        self.enabled: bool = scheduler.block_trie.enable
        self.index: PrefixIndex | None = PrefixReuseIndex(block_size=self.block_size) if self.enabled else None
        self.is_cached = np.zeros(self._allocator._log_mem.num_blocks(), bool)
        self._held: dict[int, _Held] = {}

    # ---- sequences

    def num_held(self, seq: Any) -> int:
        """How many of the sequence's first blocks the index holds."""
        held = self._held.get(seq.seq_id)
        return 0 if held is None else held.num_blocks

    def path(self, tokens: np.ndarray, namespace: str) -> BlockIds:
        """int64 [n]: the blocks that hold the beginning of `tokens`. Touches nothing."""
        return self.index.lookup(tokens, namespace, touch=False).kv_block_ids.astype(np.int64)

    def match(self, seq: Any, num_blocks: int) -> tuple[BlockIds, bool]:
        """Give a sequence without blocks of its own the cached ones that hold the beginning of its tokens.

        At most `num_blocks`, those it has included. Returns the ids added, int64 [n], and whether the bytes of any of them
        lie on another tier than the pool.
        """
        first = self.num_held(seq)
        hit = self._lock(seq, num_blocks)
        blocks = hit.kv_block_ids[first:].astype(np.int64)
        if len(blocks) == 0:
            return blocks, False
        self._allocator.update_access_time(blocks)
        self._add_reference(blocks)
        seq.logical_blocks.append(blocks)
        seq.set_step(hit.matched_length)
        return blocks, self._has_host and bool(hit.tiers[first:].any())

    def cut(self, seq: Any, num_blocks: int) -> None:
        """Take from a sequence that has cached blocks only all but the first `num_blocks`."""
        self._lock(seq, num_blocks)
        self.undo(seq, num_blocks, num_blocks * self.block_size)

    def undo(self, seq: Any, num_blocks: int, step: int) -> None:
        """Take back what a match added to a sequence that had `num_blocks` blocks and `step` tokens done."""
        lost = seq.logical_blocks[num_blocks:].copy()
        if len(lost):
            self._allocator.free(lost)
            seq.logical_blocks.resize(num_blocks)
            seq.set_step(step)

    def publish(self, seq: Any, num_blocks: int) -> tuple[BlockIds, BlockIds]:
        """Cache the first `num_blocks` blocks of a sequence; their keys and values are computed.

        Where another block of the pool holds the same prefix, the sequence takes that one and gives up its own. Where one on
        a slower tier does, the sequence's takes its place. Returns the ids that are cached now, int64 [n], one for each
        block that the sequence did not hold in the index before, and those that were replaced and are the caller's to free.
        """
        if seq.seq_id not in self._held:
            self._lock(seq, 0)
        held = self._held[seq.seq_id]
        first, size = held.num_blocks, self.block_size
        own = seq.logical_blocks[first:num_blocks].copy()
        entry = self.index.extend(held.lock, seq.all_ids[first * size : num_blocks * size], own)
        held.num_blocks = num_blocks
        cached = entry.kv_block_ids.astype(np.int64)
        # The index's reference on a block that is new there, the sequence's on one that was there.
        self._add_reference(cached)
        self.is_cached[cached] = True
        doubles = own[own != cached]
        if len(doubles):
            seq.logical_blocks[first:num_blocks] = cached
            self._allocator.free(doubles)
        replaced = np.empty(0, np.int64) if entry.replaced is None else entry.replaced.kv_block_ids.astype(np.int64)
        return cached, replaced

    def _add_reference(self, blocks: BlockIds) -> None:
        # As the allocator's `add_ref_count`, which allows for a block to be named twice and takes several times as long.
        self._allocator._log_mem.ref_count[blocks] += 1

    def release(self, seq_id: int) -> None:
        """The sequence loses its blocks now. Those that are cached were in use until this moment: they are recent."""
        held = self._held.pop(seq_id, None)
        if held is not None:
            self.index.unlock(held.lock)

    def _lock(self, seq: Any, num_blocks: int) -> Any:
        """Look up the first `num_blocks` blocks of tokens and lock what is found, in place of the sequence's lock."""
        tokens = seq.all_ids[: num_blocks * self.block_size]
        hit = self.index.lookup(tokens, namespace_of(seq), lock=True)
        before = self._held.get(seq.seq_id)
        self._held[seq.seq_id] = _Held(hit.lock, len(hit.kv_block_ids))
        if before is not None:
            self.index.unlock(before.lock)
        return hit

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
        """bool [blocks]: cached, and held by nobody else."""
        return self.is_cached & (self._allocator._log_mem.ref_count == 1)

    def candidates(self, count: int) -> VictimRequest:
        """Every block that nobody holds, on all tiers."""
        rows = self.index.blocks(unlocked=True)
        on_device = rows.tiers == TIERS.index(Tier.GPU)
        arrays = (rows.kv_block_ids, rows.parent_ids, rows.last_access, rows.depth, on_device)
        for array in arrays:
            array.flags.writeable = False
        return VictimRequest(count, *arrays)

    def evict_lru(self, num_blocks: int) -> BlockIds:
        """Forget as many blocks of the pool, and what hangs below them on the host; the caller frees what is returned."""
        return self.index.evict_lru(num_blocks).kv_block_ids.astype(np.int64)

    def evict(self, victims: BlockIds) -> BlockIds:
        """Forget chosen blocks, every block below one of them among them; the caller frees what is returned."""
        on_device = self.on_device(victims)
        gone = self.index.evict(victims[on_device]).kv_block_ids
        # What hung below blocks of the pool has gone with them.
        rest = victims[~on_device]
        rest = rest[self.index.contains(rest, Tier.CPU)]
        return np.concatenate([gone, self.index.evict(rest, Tier.CPU).kv_block_ids], dtype=np.int64)

    def move(self, block: int, src: Tier, dst: Tier) -> None:
        """The bytes are on their way to another tier. The id stays."""
        self.index.move([block], [block], src, dst)

    def freed(self, ids: BlockIds) -> None:
        """Give back the references of blocks that were evicted or replaced."""
        self.is_cached[ids] = False
        self._allocator.free(ids)

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
    if not len(seq.history_embeddings) and seq.history_multimodals.empty():
        return seq.num_valid_ids
    starts = [each.start for each in seq.history_embeddings.embeddings]
    starts += [each.start for group in seq.history_multimodals.multimodals.values() for each in group]
    return min(starts, default=seq.num_valid_ids)
