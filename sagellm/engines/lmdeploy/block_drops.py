"""Blocks that running sequences give up, as a sparse policy asks. They do not come back.

A sequence that gives up blocks gets a shorter block table. Their tokens count as `num_ignored_history`, as those that leave a
sliding window do in LMDeploy: attention and the block manager leave them out, positions do not. Its first whole blocks may
still be published in the prefix cache. Those after a gap may not: a prefix is found block by block.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sagellm.accel.sparsity.base import DropView, wrong_with_drops
from sagellm.core.hooks import EvictionReason
from sagellm.engines.lmdeploy.kv_manager import KVManager
from sagellm.engines.lmdeploy.prefix_cache import PrefixCache
from sagellm.engines.lmdeploy.sparsity import SparseSteps

__all__ = ["BlockDrops"]


class BlockDrops:
    """Owned by one scheduler. Workers get the shorter block tables with the next step, so all of them give up the same.

    Args:
        note: called with what is written to a record: the request, and what it gave up.
    """

    def __init__(
        self, scheduler: Any, steps: SparseSteps, cache: PrefixCache, kv: KVManager, note: Callable[..., None]
    ) -> None:
        from lmdeploy.pytorch.block import LogicalTokenBlocks
        from lmdeploy.pytorch.messages import MessageStatus

        self._table, self._running = LogicalTokenBlocks, (MessageStatus.LOCKED, MessageStatus.RUNNING)
        self._allocator = scheduler.block_manager.allocator
        self._steps, self._cache, self._kv, self._note = steps, cache, kv, note
        self._block_size: int = scheduler.cache_config.block_size
        self._positions: dict[int, np.ndarray] = {}  # of a sequence that has given up blocks, as of the last time
        self.num_dropped = 0

    def positions(self, seq: Any, num_blocks: int) -> np.ndarray:
        """Places in the text of the first `num_blocks` blocks of a sequence's table."""
        known = self._positions.get(seq.seq_id) if seq.num_ignored_history else None
        if known is None:
            return np.arange(num_blocks)
        after = known[-1] + 1 + np.arange(max(0, num_blocks - len(known)))
        return np.r_[known, after][:num_blocks]

    def num_whole(self, seq: Any) -> int:
        """How many of a sequence's first blocks hold the beginning of its text without a gap."""
        known = self._positions.get(seq.seq_id) if seq.num_ignored_history else None
        if known is None:
            return seq.num_blocks
        return int(np.argmin(np.r_[known == np.arange(len(known)), False]))

    def forget(self, seq: Any) -> None:
        self._positions.pop(seq.seq_id, None)

    def step_end(self, running: list[Any], is_decoding: bool) -> None:
        """All forward passes of a step, or of a round of decode steps, are over. Ask of the sequences that go on."""
        policy = self._steps.policy
        if not self._steps.is_on or (is_decoding and policy.drops_after == "prompt"):
            return
        due = []
        for seq in running:
            if seq.status not in self._running:
                continue
            length = seq.num_history_ids - seq.num_ignored_history
            keep = policy.budget(-(-seq.num_history_ids // self._block_size))
            if -(-length // self._block_size) > keep:
                due.append((seq, length, max(1, keep)))
        if not due:
            return
        view, last_blocks = self._view(due)
        try:
            given_up = [np.asarray(one) for one in policy.drop_blocks(replace(view, weights=[w.copy() for w in view.weights]))]
            fault = wrong_with_drops(given_up, view)
        except Exception as error:
            fault = f"it raised {type(error).__name__}: {error}"
        if fault:
            self._steps.switch_off(fault)
            return
        for (seq, _, _), lost, positions, block in zip(due, given_up, view.positions, last_blocks, strict=True):
            self._drop(seq, lost.astype(np.int64), positions, block)

    def _view(self, due: list[tuple[Any, int, int]]) -> tuple[DropView, list[int]]:
        size = self._block_size
        positions, weights, last_blocks = [], [], []
        for seq, length, _ in due:
            blocks = -(-length // size)
            positions.append(self.positions(seq, blocks))
            slots = self._allocator.get_physical_blocks(seq.logical_blocks[:blocks])
            last_blocks.append(int(slots[-1]))
            seen = self._steps.seen(last_blocks[-1], length)
            weights.append(np.zeros((1, blocks), np.float32) if seen is None else seen)
        policy = self._steps.policy
        view = DropView(
            block_size=size, lengths=np.array([seq.num_history_ids for seq, _, _ in due], np.int64), positions=positions,
            weights=weights if policy.observed else [],
            held=np.array([self._cache.num_held(seq) if self._cache.enabled else 0 for seq, _, _ in due], np.int64),
            keep=np.array([keep for _, _, keep in due], np.int64), first=policy.first, last=policy.last,
        )  # fmt: skip
        return view, last_blocks

    def _drop(self, seq: Any, lost: np.ndarray, positions: np.ndarray, last_block: int) -> None:
        kept = np.setdiff1d(np.arange(len(positions)), lost)
        self._steps.keep_seen(last_block, kept)
        if not len(lost):
            return
        blocks = seq.logical_blocks.get_real_blocks()
        gone = blocks[lost]
        self._kv.tell_evicted(gone, EvictionReason.SPARSE, seq.session_id)
        seq.logical_blocks = self._table(np.r_[blocks[kept], blocks[len(positions) :]])
        seq.num_ignored_history += len(lost) * self._block_size
        self._positions[seq.seq_id] = positions[kept]
        self._allocator.free(gone)
        self.num_dropped += len(lost)
        self._note(request=seq.session_id, policy=self._steps.policy.name, positions=positions[lost], kept=len(kept))
