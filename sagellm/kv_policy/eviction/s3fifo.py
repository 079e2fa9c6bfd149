"""Three FIFO queues: a small one for what is new, a main one for what proved useful, and ghosts."""

from typing import Any

from sagellm.kv_policy.arguments import RANGES, check_count, check_option, require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext
from sagellm.kv_policy.eviction.queues import Queue, append_bounded, first_evictable

__all__ = ["S3Fifo"]


class S3Fifo(EvictionPolicy):
    """New blocks go to the small queue. Its oldest block, asked to go, moves on to the main queue if it was hit `move_to_main`
    times, else it is evicted and leaves a ghost. The main queue's oldest block goes round again while hits are left, one fewer
    each time and three at most. A key that returns and has a ghost is inserted into the main queue.

    Options: `small_ratio` (.1), `ghost_ratio` (.9), both of the capacity and rounded down; `move_to_main` (2) hits.

    The main queue gives the victim while it holds more than capacity - small size, or the small queue has nothing to give.
    Until the first question for victims, what the small queue has no room for goes to the main queue; afterwards the small
    queue takes every new block, and may outgrow its size. Hits are counted anew from zero in the main queue. Victims count in
    the sizes until they are removed.

    Source: Yang et al., SOSP 2023, as in S3FIFO.c of libCacheSim 0.3.5, request by request, for capacities with a small queue
    of at least 2; below that libCacheSim stores nothing or stops.
    """

    name = "s3fifo"

    def __init__(
        self,
        capacity: int,
        *,
        small_ratio: float = 0.1,
        ghost_ratio: float = 0.9,
        move_to_main: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(capacity, **options)
        self._small_limit = int(capacity * check_option(self.name, "small_ratio", small_ratio))
        self._main_limit = capacity - self._small_limit
        self._ghost_limit = int(capacity * check_option(self.name, "ghost_ratio", ghost_ratio))
        self._move_to_main = check_count(self.name, "move_to_main", move_to_main, *RANGES["move_to_main"])
        self._small: Queue = Queue()
        self._main: Queue = Queue()
        self._ghosts: Queue = Queue()
        self._num_hits: dict[BlockKey, int] = {}
        self._returning: Queue = Queue()  # had a ghost, not yet inserted
        self._was_asked = False

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._num_hits)
        self._notice(block.key)
        is_returning = block.key in self._returning
        self._returning.pop(block.key, None)
        overflows = not self._was_asked and len(self._small) >= self._small_limit
        (self._main if is_returning or overflows else self._small)[block.key] = None
        self._num_hits[block.key] = 0

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._num_hits)
        self._num_hits[key] += 1

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        require_present(key, self._num_hits)
        del self._num_hits[key]
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        if evicted:
            append_bounded(self._ghosts, key, self._ghost_limit)

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        for place in range(context.count):
            self._was_asked = True
            if place < len(context.incoming):
                self._notice(context.incoming[place])
            main_first = len(self._main) > self._main_limit
            if not (
                (main_first and self._take_from_main(context))
                or self._take_from_small(context)
                or self._take_from_main(context)
            ):
                break
        return context.decision()

    def _notice(self, key: BlockKey) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            append_bounded(self._returning, key, self.capacity)

    def _take_from_small(self, context: PolicyContext) -> bool:
        while (key := first_evictable(self._small, context)) is not None:
            if self._num_hits[key] < self._move_to_main:
                context.take(key, "small queue")
                return True
            del self._small[key]
            self._main[key] = None
            self._num_hits[key] = 0
        return False

    def _take_from_main(self, context: PolicyContext) -> bool:
        while (key := first_evictable(self._main, context)) is not None:
            if self._num_hits[key] == 0:
                context.take(key, "main queue")
                return True
            self._main.move_to_end(key)
            self._num_hits[key] = min(self._num_hits[key], 3) - 1
        return False
