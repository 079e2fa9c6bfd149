"""Segmented LRU: a block proves itself by a hit."""

from typing import Any

from sagellm.kv_policy.arguments import check_option, require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext
from sagellm.kv_policy.eviction.queues import Queue, first_evictable, move_first

__all__ = ["Slru"]


class Slru(EvictionPolicy):
    """Put new blocks on probation and protect them after a hit; evict the least recently used block on probation.

    At most `protected_ratio` (.8) of the capacity, rounded down, is protected. Beyond that the least recently used protected
    block goes back on probation, as its most recently used. Protected blocks are evicted when nothing is on probation.

    libCacheSim's SLRU has four segments. With two of the same sizes (`seg-size=1:4`) one rule differs: there a new object
    starts in the protected segment while that has room. A model of ours with that rule gives each of its hits.

    Source: Karedla, Love and Wherry, "Caching strategies to improve disk system performance", Computer 1994.
    """

    name = "slru"

    def __init__(self, capacity: int, *, protected_ratio: float = 0.8, **options: Any) -> None:
        super().__init__(capacity, **options)
        self._protected_limit = int(check_option(self.name, "protected_ratio", protected_ratio) * capacity)
        self._probation: Queue = Queue()
        self._protected: Queue = Queue()

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._probation, self._protected)
        self._probation[block.key] = None

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._probation, self._protected)
        self._probation.pop(key, None)
        self._protected[key] = None
        self._protected.move_to_end(key)
        while len(self._protected) > self._protected_limit:
            move_first(self._protected, self._probation)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        require_present(key, self._probation, self._protected)
        del (self._probation if key in self._probation else self._protected)[key]

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        while context.missing > 0:
            if (key := first_evictable(self._probation, context)) is not None:
                context.take(key, "probation")
            elif (key := first_evictable(self._protected, context)) is not None:
                context.take(key, "protected")
            else:
                break
        return context.decision()
