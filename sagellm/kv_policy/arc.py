"""Adaptive replacement: recency and frequency share the room, by what turned out to be evicted too early."""

from typing import Any

from sagellm.kv_policy.arguments import require_absent, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext
from sagellm.kv_policy.queues import Queue, append_bounded, first_evictable

__all__ = ["Arc"]


class Arc(EvictionPolicy):
    """Blocks used once are in the recent list (T1), those used again in the frequent list (T2), each in order of last use.
    Blocks evicted from them leave a ghost (B1, B2). A key that returns and has a ghost moves the `target` size of T1: up where
    the ghost was in B1, down where it was in B2, and is inserted into T2. T1 gives the victim while it is above its target.
    No options.

    Within one question an earlier victim counts as gone, and as a ghost. A list with nothing evictable lets the other one give.

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
        self._leaves_no_ghost: set[BlockKey] = set()  # victims of the last question

    def on_insert(self, block: CachedBlock) -> None:
        require_absent(block.key, self._recent, self._frequent)
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
            # Ghosts give way when victims are chosen; the limit is for evictions that nobody asked this policy about.
            append_bounded(self._recent_ghosts if is_recent else self._frequent_ghosts, key, 2 * self.capacity)
        self._leaves_no_ghost.discard(key)

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        self._leaves_no_ghost.clear()
        leaving = _Leaving()
        for place in range(context.count):
            incoming = context.incoming[place] if place < len(context.incoming) else None
            if not self._take_one(context, incoming, leaving):
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

    def _take_one(self, context: PolicyContext, incoming: BlockKey | None, leaving: "_Leaving") -> bool:
        if incoming is not None:
            self._notice(incoming)
        ghosts = self._returning.get(incoming) if incoming is not None else None
        with_ghost = True
        if ghosts is None:
            with_ghost = self._make_room_for_ghost(leaving)
        num_recent = len(self._recent) - leaving.num_recent
        num_frequent = len(self._frequent) - leaving.num_frequent
        at_target = num_recent == self._target and ghosts is self._frequent_ghosts
        from_recent = (
            (num_recent > 0 and (num_recent > self._target or at_target)) or num_frequent == 0 or not with_ghost
        )
        return self._take_from(context, from_recent, with_ghost, leaving)

    def _make_room_for_ghost(self, leaving: "_Leaving") -> bool:
        """A key without a ghost needs room (case IV of the paper). False: the victim is to leave T1 without a ghost."""
        num_recent_ghosts = len(self._recent_ghosts) + len(leaving.recent_ghosts)
        num_frequent_ghosts = len(self._frequent_ghosts) + len(leaving.frequent_ghosts)
        num_recent = len(self._recent) - leaving.num_recent + num_recent_ghosts
        num_frequent = len(self._frequent) - leaving.num_frequent + num_frequent_ghosts
        if num_recent >= self.capacity:
            if num_recent_ghosts == 0:
                return False
            self._drop_oldest(self._recent_ghosts, leaving.recent_ghosts)
        elif num_recent + num_frequent >= 2 * self.capacity and num_frequent_ghosts > 0:
            self._drop_oldest(self._frequent_ghosts, leaving.frequent_ghosts)
        return True

    def _drop_oldest(self, ghosts: Queue, leaving: list[BlockKey]) -> None:
        if ghosts:
            ghosts.popitem(last=False)
        else:
            self._leaves_no_ghost.add(leaving.pop(0))

    def _take_from(self, context: PolicyContext, from_recent: bool, with_ghost: bool, leaving: "_Leaving") -> bool:
        for is_recent in (from_recent, not from_recent):
            key = first_evictable(self._recent if is_recent else self._frequent, context)
            if key is None:
                continue
            context.take(key, f"{'recent' if is_recent else 'frequent'} list, target {self._target:.3f}")
            if is_recent and not with_ghost:
                self._leaves_no_ghost.add(key)
            leaving.add(key, is_recent, with_ghost=with_ghost or not is_recent)
            return True
        return False


class _Leaving:
    """Victims of the question so far, by list, and those of them that will be ghosts, the oldest first."""

    def __init__(self) -> None:
        self.num_recent = 0
        self.num_frequent = 0
        self.recent_ghosts: list[BlockKey] = []
        self.frequent_ghosts: list[BlockKey] = []

    def add(self, key: BlockKey, is_recent: bool, with_ghost: bool) -> None:
        if is_recent:
            self.num_recent += 1
        else:
            self.num_frequent += 1
        if with_ghost:
            (self.recent_ghosts if is_recent else self.frequent_ghosts).append(key)
