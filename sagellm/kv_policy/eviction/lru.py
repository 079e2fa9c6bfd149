"""Least recently used."""

from typing import Any

from sagellm.kv_policy.arguments import require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext
from sagellm.kv_policy.eviction.queues import Queue

__all__ = ["Lru"]


class Lru(EvictionPolicy):
    """Evicts the block whose insertion or last hit is longest ago. No options."""

    name = "lru"

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options)
        self._queue: Queue = Queue()

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._queue)
        self._queue[block.key] = None

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._queue)
        self._queue.move_to_end(key)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        require_present(key, self._queue)
        del self._queue[key]

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        context.take_in_order(self._queue, lambda key: "least recently used")
        return context.decision()
