"""A FIFO queue with a hand that spares what was visited, without moving it."""

from typing import Any

from sagellm.kv_policy.arguments import require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext

__all__ = ["Sieve"]


class Sieve(EvictionPolicy):
    """Blocks stay in order of insertion; a hit marks a block as visited. The hand walks from old to new, from the newest back
    to the oldest, clears each mark that it finds and evicts the first block without one; the next walk starts behind it.
    No options.

    Source: Zhang et al., NSDI 2024; with libCacheSim 0.3.5 request by request.
    """

    name = "sieve"

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options)
        self._visited: dict[BlockKey, bool] = {}
        self._newer: dict[BlockKey, BlockKey | None] = {}  # the neighbours of each block in order of insertion
        self._older: dict[BlockKey, BlockKey | None] = {}
        self._oldest: BlockKey | None = None
        self._newest: BlockKey | None = None
        self._hand: BlockKey | None = None  # None: at the oldest

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._visited)
        self._visited[block.key] = False
        self._link(self._newest, block.key)
        self._link(block.key, None)

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._visited)
        self._visited[key] = True

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        require_present(key, self._visited)
        if key == self._hand:
            self._hand = self._newer[key]
        self._link(self._older.pop(key), self._newer.pop(key))
        del self._visited[key]

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        while context.missing > 0 and (victim := self._walk(context)) is not None:
            context.take(victim, "not visited")
            self._hand = self._newer[victim]
        return context.decision()

    def _walk(self, context: PolicyContext) -> BlockKey | None:
        """The next block without a mark; None after a whole round of blocks that may not go."""
        key = self._hand
        num_passed = 0
        while num_passed < len(self._visited):
            if key is None:
                key = self._oldest
            assert key is not None
            if not context.is_evictable(key):
                num_passed += 1
            elif self._visited[key]:
                self._visited[key] = False
                num_passed = 0
            else:
                return key
            key = self._newer[key]
        return None

    def _link(self, older: BlockKey | None, newer: BlockKey | None) -> None:
        if older is None:
            self._oldest = newer
        else:
            self._newer[older] = newer
        if newer is None:
            self._newest = older
        else:
            self._older[newer] = older
