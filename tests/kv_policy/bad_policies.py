"""Policies that break the contract, each in one way; `BREAKS` says which of the contract's rules must say so."""

import array
import ctypes
import random

from sagellm.kv_policy.base import EvictionDecision, EvictionPolicy, PolicyContext
from sagellm.kv_policy.eviction.lru import Lru

LIBC = ctypes.CDLL(None)


def with_reasons(victims):
    return EvictionDecision(tuple(victims), "", ("mine",) * len(victims))


class TooFew(Lru):
    def select_victims(self, context):
        return with_reasons(super().select_victims(context).victims[:-1])


class TooMany(Lru):
    def select_victims(self, context):
        more = PolicyContext(context.count + 1, context._blocks)
        return super().select_victims(more)


class Foreign(Lru):
    def select_victims(self, context):
        victims = super().select_victims(context).victims
        return with_reasons((12345, *victims)[: context.count])


class Departed(Lru):
    """Forgets to forget what was invalidated."""

    def on_remove(self, key, evicted=True):
        super().on_remove(key, evicted)
        if not evicted:
            self.departed = key

    def select_victims(self, context):
        victims = super().select_victims(context).victims
        departed = getattr(self, "departed", None)
        return with_reasons(victims if departed in (None, *self._queue) else (departed, *victims)[: context.count])


class Locked(Lru):
    def select_victims(self, context):
        return with_reasons(tuple(self._queue)[: context.count])


class RootFirst(Lru):
    """Good victims, in an order in which a block goes before the one that continues it."""

    def select_victims(self, context):
        return with_reasons(super().select_victims(context).victims[::-1])


class Twice(Lru):
    def select_victims(self, context):
        victims = super().select_victims(context).victims
        return with_reasons((victims[:1] + victims)[: context.count])


class NoReasons(Lru):
    def select_victims(self, context):
        return EvictionDecision(super().select_victims(context).victims, "", ())


class JustAList(Lru):
    def select_victims(self, context):
        return list(super().select_victims(context).victims)


class ByChance(Lru):
    def select_victims(self, context):
        context.take_in_order(random.sample(list(self._queue), len(self._queue)), lambda key: "chance")
        return context.decision()


class SharesState(Lru):
    """Instances share a count of their calls, which decides for the next instance: first FIFO, later LIFO."""

    num_asked = 0

    def select_victims(self, context):
        SharesState.num_asked += 1
        keys = list(self._queue)
        context.take_in_order(keys if SharesState.num_asked % 2 else keys[::-1], lambda key: "shared")
        return context.decision()


class RemovesWhenAsked(Lru):
    def select_victims(self, context):
        decision = super().select_victims(context)
        for key in decision.victims:
            del self._queue[key]
        return decision

    def on_remove(self, key, evicted=True):
        if key in self._queue:
            super().on_remove(key, evicted)


class OnceOnly(Lru):
    """A block that comes back is an error to it."""

    def __init__(self, capacity, **options):
        super().__init__(capacity, **options)
        self.known = set()

    def on_insert(self, block):
        if block.key in self.known:
            raise KeyError(block.key)
        super().on_insert(block)

    def on_remove(self, key, evicted=True):
        super().on_remove(key, evicted)
        if len(self.known) < 100:
            self.known.add(key)


class NeedsIncoming(Lru):
    def select_victims(self, context):
        context.incoming[context.count - 1] if context.count else None
        return super().select_victims(context)


class Recursive(Lru):
    """Follows parents by recursion: a long sequence is too long for it."""

    def __init__(self, capacity, **options):
        super().__init__(capacity, **options)
        self.parents = {}

    def on_insert(self, block):
        super().on_insert(block)
        self.parents[block.key] = block.parent
        self.depth(block.key)

    def on_remove(self, key, evicted=True):
        super().on_remove(key, evicted)
        del self.parents[key]

    def depth(self, key):
        if len(self.parents) >= 300:
            raise RecursionError("too deep")
        return 0


class Keeps(Lru):
    def __init__(self, capacity, **options):
        super().__init__(capacity, **options)
        self.kept = []

    def on_remove(self, key, evicted=True):
        super().on_remove(key, evicted)
        self.kept.append(key)


class KeepsCopies(Keeps):
    def on_remove(self, key, evicted=True):
        Lru.on_remove(self, key, evicted)
        self.kept.append(int(key) + 1)


class KeepsNumbers(Lru):
    def __init__(self, capacity, **options):
        super().__init__(capacity, **options)
        self.kept = array.array("Q")

    def on_remove(self, key, evicted=True):
        super().on_remove(key, evicted)
        self.kept.append(int(key))


class Leaks(Lru):
    """As native code would: memory that Python knows nothing of."""

    def on_remove(self, key, evicted=True):
        super().on_remove(key, evicted)
        LIBC.malloc(8)


class NeedsNoRoom(Lru):
    def __init__(self, capacity, **options):
        super().__init__(max(capacity, 1), **options)


class Unbuildable(Lru):
    def __init__(self, capacity, **options):
        raise OSError("no disk")


class Lenient(Lru):
    """Takes any event."""

    def on_insert(self, block):
        self._queue[block.key] = None

    def on_remove(self, key, evicted=True):
        self._queue.pop(key, None)


class Abstract(EvictionPolicy):
    name = "abstract"


BREAKS = {
    TooFew: "enough", TooMany: "no_more", Foreign: "on_tier", Departed: "on_tier", Locked: "unpinned", RootFirst: "unpinned",
    Twice: "distinct", NoReasons: "reasons", JustAList: "answer", ByChance: "deterministic", SharesState: "deterministic",
    RemovesWhenAsked: "asking", OnceOnly: "raises_nothing", NeedsIncoming: "raises_nothing", Recursive: "raises_nothing",
    Keeps: "bounded", KeepsCopies: "bounded", KeepsNumbers: "bounded", Leaks: "bounded", NeedsNoRoom: "builds",
    Unbuildable: "builds", Abstract: "builds", Lenient: "bad_events",
}  # fmt: skip

# The scenarios of the rules, and of the faults, that `requests` does not show.
SHOWN_IN = {
    "deterministic": "twice", "asking": "asking", "bounded": "churn", "builds": "building", "bad_events": "bad_events",
    NeedsIncoming: "asking", Recursive: "chain",
}  # fmt: skip

# Rules that a fault breaks besides its own: a bad victim is one good victim fewer, and one that was lost is asked for again.
FOLLOWS = {
    "on_tier": {"enough", "asking"}, "unpinned": {"enough", "asking"}, "distinct": {"enough", "asking"},
    "answer": {"enough", "asking"}, "enough": {"asking"}, "no_more": {"asking"}, "reasons": {"asking"},
    "asking": {"enough", "raises_nothing", "bad_events"},
}  # fmt: skip
