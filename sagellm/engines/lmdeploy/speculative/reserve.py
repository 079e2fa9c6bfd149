"""KV blocks for guesses: taken where there is plenty, and given back as soon as the guesses are judged."""

from collections.abc import Callable
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

    def size(self, needed: int) -> int:
        """Tokens to find room for behind each sequence that decodes; `needed`: without guesses."""
        extra = self._lookahead() * self._num_loops
        if not extra:
            return needed
        scheduler = self._scheduler
        size = scheduler.cache_config.block_size
        most = needed + extra
        num_lacking = sum([max(0, -(-(seq.num_all_ids + most) // size) - seq.num_blocks) for seq in scheduler.running])
        return most if num_lacking < scheduler.block_manager.get_num_free_gpu_blocks() else needed

    def give_back(self, seq: Any) -> int:
        """Free the blocks behind the last token of a sequence that is not on the device; returns how many."""
        blocks = seq.logical_blocks
        keep = -(-seq.num_valid_ids // seq.block_size)
        num = len(blocks) - keep
        if num <= 0:
            return 0
        self._scheduler.block_manager.allocator.free(blocks.get_real_blocks()[keep:].copy())
        blocks.resize(keep)
        return num
