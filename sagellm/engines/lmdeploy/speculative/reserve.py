"""KV blocks for guesses: taken where there is plenty, and given back as soon as the guesses are judged."""

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Reserve"]


class Reserve:
    """Guesses get free blocks, or the rest of the last block: nobody loses blocks for them. While the step runs
    they are missing: a prompt that is chosen then may evict prefixes that it would have left otherwise.

    Args:
        lookahead: how many guesses there may be for a sequence and step, now.
        num_loops: decode steps of a round.
    """

    def __init__(self, scheduler: Any, lookahead: Callable[[], int], num_loops: int) -> None:
        self._scheduler = scheduler
        self._lookahead, self._num_loops = lookahead, num_loops
        self._lent: dict[int, Any] = {}  # sequences that may hold blocks for guesses, by their ids

    def size(self, needed: int) -> int:
        """Tokens to find room for behind each sequence that decodes; `needed`: without guesses."""
        extra = self._lookahead() * self._num_loops
        if not extra:
            return needed
        scheduler = self._scheduler
        size = scheduler.cache_config.block_size
        most = needed + extra
        num_lacking = 0
        for seq in scheduler.running:
            lacking = -(-(seq.num_all_ids + most) // size) - len(seq.logical_blocks)
            if lacking > 0:
                num_lacking += lacking
        if num_lacking >= scheduler.block_manager.get_num_free_gpu_blocks():
            return needed
        for seq in scheduler.running:
            self._lent[seq.seq_id] = seq
        return most

    def give_back(self, running: Iterable[Any]) -> None:
        """Free the blocks behind the last token of sequences that are not on the device."""
        lent = self._lent
        if not lent:
            return
        size = self._scheduler.cache_config.block_size
        for seq in running:
            if lent.pop(seq.seq_id, None) is None:
                continue
            blocks, keep = seq.logical_blocks, -(-seq.num_valid_ids // size)
            if len(blocks) > keep:
                self._scheduler.block_manager.allocator.free(blocks.get_real_blocks()[keep:].copy())
                blocks.resize(keep)
        for seq in list(lent.values()):  # on the device in a further step, waiting for blocks anew, or gone
            if seq.session_id not in self._scheduler.sessions:
                del lent[seq.seq_id]
