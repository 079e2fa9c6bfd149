"""Adaptive replacement: recency and frequency share the room, by what turned out to be evicted too early."""

from typing import Any

from sagellm.kv_policy.arguments import require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext
from sagellm.kv_policy.eviction.queues import Queue, append_bounded, first_evictable

__all__ = ["Arc"]


class Arc(EvictionPolicy):
    """Blocks used once are in the recent list (T1), those used again in the frequent list (T2), each in order of last use.
    Blocks evicted from them leave a ghost (B1, B2). A key that returns and has a ghost moves the `target` size of T1: up where
    the ghost was in B1, down where it was in B2, and is inserted into T2. T1 gives the victim while it is above its target.
    No options.

    A list with nothing evictable lets the other one give. Victims count in the sizes until they are removed.

    Source: Megiddo and Modha, FAST 2003; with libCacheSim 0.3.5 request by request. As there the target is a real number, and
    the oldest ghost of B2 gives way only when a key that has no ghost needs room and both pairs together hold 2 * capacity.
    """

    name = "arc"

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options)
        self._recent: Queue = Queue()
        self._frequent: Queue = Queue()
        self._recent_ghosts: Queue = Queue()
        self._frequent_ghosts: Queue = Queue()
        self._target = 0.0  # 0 to capacity
        self._returning: Queue = Queue()  # noticed, not yet inserted, with the ghost list it was in
        self._leaves_no_ghost: set[BlockKey] = set()  # victims

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._recent, self._frequent)
        self._notice(block.key)
        is_returning = self._returning.pop(block.key, None) is not None
        (self._frequent if is_returning else self._recent)[block.key] = None

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._recent, self._frequent)
        self._recent.pop(key, None)
        self._frequent[key] = None
        self._frequent.move_to_end(key)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        require_present(key, self._recent, self._frequent)
        is_recent = key in self._recent
        del (self._recent if is_recent else self._frequent)[key]
        if evicted and key not in self._leaves_no_ghost:
            # Ghosts are dropped when victims are chosen; the limit covers evictions that this policy did not choose.
            append_bounded(self._recent_ghosts if is_recent else self._frequent_ghosts, key, 2 * self.capacity)
        self._leaves_no_ghost.discard(key)

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        for place in range(context.count):
            incoming = context.incoming[place] if place < len(context.incoming) else None
            if not self._take_one(context, incoming):
                break
        return context.decision()

    def _notice(self, key: BlockKey) -> None:
        """The key returns: if it has a ghost, take that off its list and learn from it."""
        num_recent, num_frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if key in self._recent_ghosts:
            self._target = min(self._target + max(num_frequent / num_recent, 1.0), float(self.capacity))
            del self._recent_ghosts[key]
            append_bounded(self._returning, key, self.capacity, self._recent_ghosts)
        elif key in self._frequent_ghosts:
            self._target = max(self._target - max(num_recent / num_frequent, 1.0), 0.0)
            del self._frequent_ghosts[key]
            append_bounded(self._returning, key, self.capacity, self._frequent_ghosts)

    def _take_one(self, context: PolicyContext, incoming: BlockKey | None) -> bool:
        if incoming is not None:
            self._notice(incoming)
        ghosts = self._returning.get(incoming) if incoming is not None else None
        with_ghost = ghosts is not None or self._make_room_for_ghost()
        num_recent = len(self._recent)
        at_target = num_recent == self._target and ghosts is self._frequent_ghosts
        is_above = num_recent > 0 and (num_recent > self._target or at_target)
        from_recent = is_above or not self._frequent or not with_ghost
        for is_recent in (from_recent, not from_recent):
            key = first_evictable(self._recent if is_recent else self._frequent, context)
            if key is None:
                continue
            context.take(key, f"{'recent' if is_recent else 'frequent'} list, target {self._target:.3f}")
            self._leaves_no_ghost.discard(key)
            if is_recent and not with_ghost:
                self._leaves_no_ghost.add(key)
            return True
        return False

    def _make_room_for_ghost(self) -> bool:
        """A key without a ghost needs room (case IV of the paper). False: the victim is to leave T1 without a ghost."""
        num_recent = len(self._recent) + len(self._recent_ghosts)
        if num_recent >= self.capacity:
            if not self._recent_ghosts:
                return False
            self._recent_ghosts.popitem(last=False)
        elif (
            num_recent + len(self._frequent) + len(self._frequent_ghosts) >= 2 * self.capacity and self._frequent_ghosts
        ):
            self._frequent_ghosts.popitem(last=False)
        return True
