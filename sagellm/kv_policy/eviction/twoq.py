"""2Q: a block enters the LRU list only when it returns soon after it was evicted."""

from typing import Any

from sagellm.kv_policy.arguments import check_option, require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext
from sagellm.kv_policy.eviction.queues import Queue, append_bounded, first_evictable

__all__ = ["TwoQ"]


class TwoQ(EvictionPolicy):
    """New blocks go to A1in, a FIFO queue where hits change nothing; those evicted from it leave a ghost in A1out. A key that
    returns while it is in A1out goes to Am, which is LRU. A1in gives the victim while it is above its size or Am has nothing
    to give, else Am does, without a ghost. Victims count in the sizes until they are removed.

    Options: `in_ratio` (.25) and `out_ratio` (.5) of the capacity, rounded down, at least one block: sizes of A1in and A1out.

    Source: Johnson and Shasha, VLDB 1994, the full version.
    """

    name = "twoq"

    def __init__(self, capacity: int, *, in_ratio: float = 0.25, out_ratio: float = 0.5, **options: Any) -> None:
        super().__init__(capacity, **options)
        self._in_limit = max(1, int(check_option(self.name, "in_ratio", in_ratio) * capacity))
        self._out_limit = max(1, int(check_option(self.name, "out_ratio", out_ratio) * capacity))
        self._a1in: Queue = Queue()
        self._a1out: Queue = Queue()
        self._am: Queue = Queue()
        self._returning: Queue = Queue()  # was in A1out, not yet inserted

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._a1in, self._am)
        self._notice(block.key)
        is_returning = block.key in self._returning
        self._returning.pop(block.key, None)
        (self._am if is_returning else self._a1in)[block.key] = None

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._a1in, self._am)
        if key in self._am:
            self._am.move_to_end(key)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        require_present(key, self._a1in, self._am)
        if key in self._am:
            del self._am[key]
            return
        del self._a1in[key]
        if evicted:
            append_bounded(self._a1out, key, self._out_limit)

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        for place in range(context.count):
            if place < len(context.incoming):
                self._notice(context.incoming[place])
            first_in = first_evictable(self._a1in, context)
            first_am = first_evictable(self._am, context)
            if first_in is not None and (len(self._a1in) > self._in_limit or first_am is None):
                context.take(first_in, "A1in")
            elif first_am is not None:
                context.take(first_am, "Am")
            else:
                break
        return context.decision()

    def _notice(self, key: BlockKey) -> None:
        if key in self._a1out:
            del self._a1out[key]
            append_bounded(self._returning, key, self.capacity)
