"""Evictions of a replay, and those that were premature."""

from collections.abc import Sequence

from sagellm.kv_policy.base import BlockKey


class Evictions:
    """An eviction is premature if the block comes in again before `soon` further accesses have passed.

    Attributes:
        num_accesses: blocks that requests asked for so far, counted by the replay.
        num_evicted, num_soon: evictions, and those that turned out premature.
    """

    def __init__(self, soon: int) -> None:
        self.num_accesses = 0
        self.num_evicted = 0
        self.num_soon = 0
        self._soon = soon
        self._evicted_at: dict[BlockKey, int] = {}  # number of accesses by then

    def left(self, keys: Sequence[BlockKey]) -> None:
        """The blocks were evicted."""
        self.num_evicted += len(keys)
        self._evicted_at.update(dict.fromkeys(keys, self.num_accesses))

    def came(self, key: BlockKey) -> None:
        """The block is there, for the first time or again."""
        evicted_at = self._evicted_at.pop(key, None)
        if evicted_at is not None and self.num_accesses - evicted_at < self._soon:
            self.num_soon += 1
