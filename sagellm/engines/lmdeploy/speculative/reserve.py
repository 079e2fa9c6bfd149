"""KV blocks for guesses: taken where there is plenty, and given back as soon as the guesses are judged."""

from collections.abc import Callable, Iterable
from typing import Any

from sagellm.core.errors import SpeculationError

__all__ = ["Reserve", "check_lookahead"]


def check_lookahead(lookahead: int, num_loops: int, num_blocks: int, block_size: int) -> None:
    """Raises SpeculationError: a pool of so many blocks cannot hold the guesses of a round for one sequence."""
    num_ahead, num_held = lookahead * num_loops, num_blocks * block_size
    if num_ahead >= num_held:
        raise SpeculationError(
            f"a lookahead of {lookahead} tokens in each of {num_loops} decode steps of a round is {num_ahead} tokens ahead of "
            f"a text, and the pool of {num_blocks} blocks holds {num_held}; give a smaller lookahead, a smaller --decode-round "
            "or more --kv-blocks."
        )


class Reserve:
    """Guesses get the rest of the last block, free blocks, and unused blocks of cached prefixes, which are evicted as
    for tokens.
    No request loses its blocks to them. Where that is too little for all, guesses are shorter. While the step
    runs these blocks are missing: a prompt that is chosen then may evict prefixes that it would have left otherwise.

    Args:
        lookahead: how many guesses there may be for a sequence and step, now.
        num_loops: decode steps of a round.

    Raises:
        SpeculationError: the pool cannot hold the guesses of one sequence.
    """

    def __init__(self, scheduler: Any, lookahead: Callable[[], int], num_loops: int) -> None:
        self._scheduler = scheduler
        self._lookahead, self._num_loops = lookahead, num_loops
        self._lent: dict[int, Any] = {}  # sequences that may hold blocks for guesses, by their ids
        config = scheduler.cache_config
        check_lookahead(lookahead(), num_loops, config.num_gpu_blocks, config.block_size)

    def size(self, needed: int) -> int:
        """Tokens to find room for behind each sequence that decodes; `needed`: without guesses."""
        extra, num_cached = self._lookahead() * self._num_loops, None
        while extra:
            missing = self._num_missing(needed + extra)
            if missing > 0:
                if num_cached is None:  # O(blocks)
                    num_cached = self._scheduler.sage.kv.counts().cached
                if missing <= num_cached:
                    self._scheduler.block_trie.evict(missing)
                    missing = self._num_missing(needed + extra)
            if missing <= 0:
                for seq in self._scheduler.running:
                    self._lent[seq.seq_id] = seq
                return needed + extra
            extra //= 2
        return needed

    def _num_missing(self, num_tokens: int) -> int:
        """Blocks that are to become free, so that there is room for so many tokens behind each sequence and a block is left:
        LMDeploy's scheduler evicts where it would take the last."""
        scheduler = self._scheduler
        size = scheduler.cache_config.block_size
        num_lacking = 0
        for seq in scheduler.running:
            lacking = -(-(seq.num_all_ids + num_tokens) // size) - len(seq.logical_blocks)
            if lacking > 0:
                num_lacking += lacking
        return num_lacking and num_lacking + 1 - scheduler.block_manager.get_num_free_gpu_blocks()

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
