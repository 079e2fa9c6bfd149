"""Deepest block first: what is near the root is shared by more."""

from typing import Any

from sagellm.kv_policy.arguments import require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_policy.eviction.queues import Ranked

__all__ = ["PrefixDepth"]


class PrefixDepth(Ranked):
    """Evicts the block with the greatest depth, of equally deep ones the least recently inserted or hit. No options."""

    name = "prefix_depth"

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options)
        self._tick = 0  # a rank is (-depth, tick of the last use)

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._ranking)
        self._tick += 1
        self._ranking[block.key] = (-block.depth, self._tick)

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._ranking)
        self._tick += 1
        self._ranking[key] = (self._ranking[key][0], self._tick)

    def _reason(self, key: BlockKey) -> str:
        return f"depth {-int(self._ranking[key][0])}"
