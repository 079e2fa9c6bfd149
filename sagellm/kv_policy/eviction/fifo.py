"""First in, first out."""

from typing import Any

from sagellm.kv_policy.arguments import require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext
from sagellm.kv_policy.eviction.queues import Queue

__all__ = ["Fifo"]


class Fifo(EvictionPolicy):
    """Evicts the block that was inserted first. Hits change nothing. No options."""

    name = "fifo"

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options)
        self._queue: Queue = Queue()

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._queue)
        self._queue[block.key] = None

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._queue)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        require_present(key, self._queue)
        del self._queue[key]

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        context.take_in_order(self._queue, lambda key: "inserted first")
        return context.decision()
