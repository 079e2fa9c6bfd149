"""Least frequently used."""

from typing import Any

from sagellm.kv_policy.arguments import require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext
from sagellm.kv_policy.eviction.queues import Queue

__all__ = ["Lfu"]


class Lfu(EvictionPolicy):
    """Evicts the block with the fewest uses since it was inserted, which counts as the first; of those with as many, the one
    that came to this number first. A block that returns starts at one again. No options.

    Source: the LFU of libCacheSim 0.3.5, request by request.
    """

    name = "lfu"

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options)
        self._num_uses: dict[BlockKey, int] = {}
        self._used: dict[int, Queue] = {}  # by number of uses, in order of arrival at it; no queue is empty

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._num_uses)
        self._arrive(block.key, 1)

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._num_uses)
        self._arrive(key, self._leave(key) + 1)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        require_present(key, self._num_uses)
        self._leave(key)

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        in_order = (key for num_uses in sorted(self._used) for key in self._used[num_uses])
        context.take_in_order(in_order, lambda key: f"used {self._num_uses[key]} times")
        return context.decision()

    def _arrive(self, key: BlockKey, num_uses: int) -> None:
        self._num_uses[key] = num_uses
        self._used.setdefault(num_uses, Queue())[key] = None

    def _leave(self, key: BlockKey) -> int:
        num_uses = self._num_uses.pop(key)
        del self._used[num_uses][key]
        if not self._used[num_uses]:
            del self._used[num_uses]
        return num_uses
