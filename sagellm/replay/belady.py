"""Belady's choice as an eviction policy: what is asked for again last goes first. It knows the future, so it is a bound.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
"""

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from sagellm.core.errors import PolicyError
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext


class Belady(EvictionPolicy):
    """Victim: the block whose next request is farthest; ties: the deepest, then the one that was inserted first.

    The future is that of requests, which no policy can change; the order of events within a request depends on what is
    there. Whoever replays says `on_request` before the events of each. A block is asked for wherever its parent is needed
    too, so the parent's next request is never later, and the farthest block is one that no other continues.

    Options:
        keys: uint64 [n] of all requests; `offsets`: int64 [r + 1]. Every block a request of its own: offsets 0, 1, 2, ...

    Complexity: O(log n) an event.
    """

    name = "belady"

    def __init__(self, capacity: int, *, keys: NDArray[np.uint64], offsets: NDArray[np.int64]) -> None:
        super().__init__(capacity)
        requests_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        # What is deeper than the tier has room for never comes to it.
        takes_part = np.arange(len(keys)) - offsets[:-1][requests_of] < capacity
        keys, requests_of = keys[takes_part], requests_of[takes_part]
        order = np.argsort(keys, kind="stable")
        in_order = keys[order]
        starts = np.flatnonzero(np.concatenate(([True], in_order[1:] != in_order[:-1]))) if len(keys) else order
        requests = requests_of[order].tolist()
        ends = [*starts.tolist(), len(keys)][1:]
        # By key the requests that have it, last one first, so that those which have passed are popped off the end.
        self._uses = {
            key: requests[start:end][::-1]
            for key, start, end in zip(in_order[starts].tolist(), starts.tolist(), ends, strict=True)
        }
        self._now = -1
        self._num_inserted = 0
        self._rank: dict[BlockKey, tuple[float, int, int]] = {}  # of a block on the tier, as in the heap
        self._heap: list[tuple[float, int, int, BlockKey]] = []  # the best victim first; some entries are out of date

    def on_request(self, index: int) -> None:
        """The events that follow are of this request, or of one before it that comes again."""
        self._now = max(self._now, index)

    def on_insert(self, block: CachedBlock) -> None:
        if block.key in self._rank:
            raise PolicyError(f"block {block.key} is on the tier already.")
        self._place(block.key, -block.depth, self._num_inserted)
        self._num_inserted += 1

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        if key not in self._rank:
            raise PolicyError(f"block {key} is not on the tier; tell its on_insert first.")
        self._place(key, *self._rank[key][1:])

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        if self._rank.pop(key, None) is None:
            raise PolicyError(f"block {key} is not on the tier.")

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        passed: list[tuple[float, int, int, BlockKey]] = []
        heap, rank = self._heap, self._rank
        while heap and context.missing > 0:
            entry = heapq.heappop(heap)
            key = entry[3]
            if rank.get(key) != entry[:3]:
                continue
            passed.append(entry)
            if context.is_evictable(key):
                reason = "never used again" if entry[0] == -math.inf else f"next use {-entry[0]:.0f}"
                parent = context.take(key, reason)
                if parent is not None and parent in rank and rank[parent] < entry[:3]:
                    heapq.heappush(heap, (*rank[parent], parent))  # it was passed over while this block hung on it
        for entry in passed:
            heapq.heappush(heap, entry)
        return context.decision()

    def _place(self, key: BlockKey, depth: int, number: int) -> None:
        uses = self._uses.get(key, [])
        while uses and uses[-1] <= self._now:
            uses.pop()
        rank = (-uses[-1] if uses else -math.inf, depth, number)
        self._rank[key] = rank
        heapq.heappush(self._heap, (*rank, key))
        if len(self._heap) > 4 * len(self._rank) + 64:
            self._heap = [(*rank, key) for key, rank in self._rank.items()]
            heapq.heapify(self._heap)
