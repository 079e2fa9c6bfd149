"""Belady's choice as an eviction policy: what is asked for again last goes first. It knows the future, so it is a bound.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
"""

import math

import numpy as np
from numpy.typing import NDArray

from sagellm.kv_policy.arguments import require_absent
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_policy.eviction.belady import FarthestNextUse


class Belady(FarthestNextUse):
    """Victim: the block whose next request is farthest; ties: the deepest, then the one that was inserted first.

    The future is that of requests, which no policy can change; the order of events within a request depends on what is
    there. The replay calls `on_request` before the events of each. A block is asked for wherever its parent is needed
    too, so the parent's next request is never later, and the farthest block is one that no other continues. The Belady of
    `kv_policy` is told events instead and checks that each comes, which suits a flat cache but no request that is retried.

    Options:
        keys: uint64 [n] of all requests; `offsets`: int64 [r + 1]. Every block a request of its own: offsets 0, 1, 2, ...

    Complexity: O(log n) an event.
    """

    name = "belady"

    def __init__(self, capacity: int, *, keys: NDArray[np.uint64], offsets: NDArray[np.int64]) -> None:
        super().__init__(capacity)
        requests_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        # Blocks deeper than the tier's capacity never come to it.
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

    def on_request(self, index: int) -> None:
        """The events that follow are of this request, or of one before it that comes again."""
        self._now = max(self._now, index)

    def on_insert(self, block: CachedBlock) -> None:
        require_absent(block.key, self._ranking)
        self._ranking[block.key] = (-self._next_use(block.key), -block.depth, self._num_inserted)
        self._num_inserted += 1

    def _next_use(self, key: BlockKey) -> float:
        """The index of the next request that has the block."""
        uses = self._uses.get(key, [])
        while uses and uses[-1] <= self._now:
            uses.pop()
        return uses[-1] if uses else math.inf
