"""Containers of the reference policies: queues with the oldest block first, a ranking, and a policy that goes by one."""

import heapq
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from sagellm.kv_policy.arguments import require_present
from sagellm.kv_policy.base import BlockKey, EvictionDecision, EvictionPolicy, PolicyContext

__all__ = ["Queue", "Ranked", "Ranking", "append_bounded", "first_evictable", "move_first"]

# Keys in order, the oldest (least recently used) first. The value is the policy's own, often nothing.
Queue = OrderedDict[BlockKey, Any]


def first_evictable(queue: Iterable[BlockKey], context: PolicyContext) -> BlockKey | None:
    """Return the first block of the queue that may be taken now, or None. O(blocks passed over)."""
    return next((key for key in queue if context.is_evictable(key)), None)


def move_first(source: Queue, target: Queue) -> None:
    """The oldest block of one queue becomes the newest of the other."""
    key, value = source.popitem(last=False)
    target[key] = value


def append_bounded(queue: Queue, key: BlockKey, limit: int, value: Any = None) -> None:
    """The key becomes the newest; the oldest ones beyond the limit are dropped."""
    queue[key] = value
    while len(queue) > limit:
        queue.popitem(last=False)


class Ranking:
    """Blocks ranked by tuples of numbers; the lowest goes first. Setting a rank costs O(log n)."""

    def __init__(self) -> None:
        self._ranks: dict[BlockKey, tuple[float, ...]] = {}
        self._heap: list[tuple[tuple[float, ...], BlockKey]] = []  # also holds ranks that blocks no longer have

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._ranks

    def __getitem__(self, key: BlockKey) -> tuple[float, ...]:
        return self._ranks[key]

    def __setitem__(self, key: BlockKey, rank: tuple[float, ...]) -> None:
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def __delitem__(self, key: BlockKey) -> None:
        del self._ranks[key]

    def take(self, context: PolicyContext, reason: Callable[[BlockKey], str]) -> None:
        """Take what is missing, each time the lowest of the blocks that may go at that moment."""
        passed = []
        while context.missing > 0 and self._heap:
            rank, key = heapq.heappop(self._heap)
            if self._ranks.get(key) != rank:
                continue
            passed.append((rank, key))
            if not context.is_evictable(key):
                continue
            parent = context.take(key, reason(key))
            if parent is not None and parent in self._ranks:  # it may have been passed over
                heapq.heappush(self._heap, (self._ranks[parent], parent))
        for entry in passed:
            heapq.heappush(self._heap, entry)


class Ranked(EvictionPolicy):
    """Evicts the block of the lowest rank. A subclass ranks blocks in `on_insert` and `on_hit`."""

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options)
        self._ranking = Ranking()

    @abstractmethod
    def _reason(self, key: BlockKey) -> str:
        """Return the reason for which this block goes."""

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        require_present(key, self._ranking)
        del self._ranking[key]

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        self._ranking.take(context, self._reason)
        return context.decision()
