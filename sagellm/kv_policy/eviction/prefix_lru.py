"""LRU over the tree of prefixes: the leaf whose branch is longest unused."""

from typing import Any

from sagellm.kv_policy.arguments import require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_policy.eviction.queues import Ranked

__all__ = ["PrefixLru"]


class PrefixLru(Ranked):
    """Each insertion and hit stamps its block with the next tick; an insertion also stamps the blocks above it, up to the first
    that is not on the tier. The lowest stamp goes, of equal ones the deepest, then the one inserted first. No options.

    Differs from `Lru` in that a block is never older than a block inserted below it.
    """

    name = "prefix_lru"

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options)
        # A rank is (stamp, -depth, number of the insertion).
        self._parents: dict[BlockKey, BlockKey | None] = {}
        self._tick = 0
        self._num_inserted = 0

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._parents)
        self._tick += 1
        self._num_inserted += 1
        self._parents[block.key] = block.parent
        self._ranking[block.key] = (self._tick, -block.depth, self._num_inserted)
        # Up to a block that is not less deep than the one below it: invalid depths must not make this an endless loop.
        below, above = block.key, block.parent
        while above is not None and above in self._parents and self._ranking[above][1] > self._ranking[below][1]:
            self._stamp(above)
            below, above = above, self._parents[above]

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._parents)
        self._tick += 1
        self._stamp(key)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        super().on_remove(key, evicted)
        del self._parents[key]

    def _reason(self, key: BlockKey) -> str:
        return "oldest leaf"

    def _stamp(self, key: BlockKey) -> None:
        self._ranking[key] = (self._tick, *self._ranking[key][1:])
