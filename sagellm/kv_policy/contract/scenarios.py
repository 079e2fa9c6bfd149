"""The scenarios of the contract checks: each plays events on a policy and reports the rules that it breaks."""

import ctypes
import gc
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from sagellm.core.contract import Broke, Played, Report, Scenario
from sagellm.core.errors import PolicyError
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionPolicy, PolicyContext
from sagellm.kv_policy.contract.world import MASK, World

__all__ = ["SCENARIOS"]

Make = Callable[[int], EvictionPolicy]

NUM_STEPS = 100
NUM_TENANTS = 12
CAPACITIES = (1, 2, 7, 40)
CHAIN = 300
CHURN = 3000  # blocks that come and go in a phase of the memory check


def random_path(chance: random.Random, longest: int) -> list[CachedBlock]:
    """The blocks of a request of a random tenant: few branches near the root, so that prefixes are shared."""
    tenant = min(int(chance.expovariate(0.4)), NUM_TENANTS - 1)
    path: list[CachedBlock] = []
    key: BlockKey | None = None
    for depth in range(1, chance.randint(1, longest) + 1):
        branch = min(int(chance.expovariate(0.7)), 6)
        parent, key = key, _child(tenant if key is None else key, branch)
        size_bytes, cost_s = 1000 * (1 + branch), 0.0 if branch == 1 else 0.001 * depth
        path.append(CachedBlock(key, parent, depth, 64, size_bytes, cost_s, f"tenant-{tenant}"))
    return path


def _child(above: int, branch: int) -> BlockKey:
    return BlockKey(((above ^ (above >> 31)) * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03 * (branch + 1)) & MASK)


def play(world: World, num_steps: int = NUM_STEPS) -> None:
    """Requests come and end, blocks are invalidated, room is asked for and not used: whatever an engine does."""
    chance = world.random
    for _ in range(num_steps):
        step = chance.random()
        if step < 0.7:
            incoming = chance.choice(("exact", "exact", "empty", "longer", "shorter"))
            world.admit(random_path(chance, min(world.capacity, 9)), incoming)
        elif step < 0.85 and world.running:
            world.release(chance.randrange(len(world.running)))
        elif step < 0.92 and world.unpinned():
            world.remove(chance.choice(world.unpinned()), evicted=False)
        elif step < 0.96:
            for victim in world.ask(chance.randint(0, 3)):
                world.remove(victim, evicted=True)
        elif world.unpinned():  # an engine may lose a block that no policy was asked about
            world.remove(chance.choice(world.unpinned()), evicted=True)


def requests(make: Make, seed: int, report: Report) -> Played:
    num_events = 0
    seen: set[str] = set()
    for capacity in CAPACITIES:
        world = World(make(capacity), capacity, seed, report)
        with suppress(Broke):
            play(world)
        num_events += world.num_events
        seen |= world.seen
    return Played(num_events, seen)


def twice(make: Make, seed: int, report: Report) -> Played:
    """The same events on two instances; what one does must depend on nothing else."""
    worlds = []
    for _ in range(2):
        world = World(make(CAPACITIES[2]), CAPACITIES[2], seed, lambda rule, message: None)
        try:
            play(world)
        except Broke:
            return Played(0, frozenset())  # another scenario reports it
        worlds.append(world)
    first, second = (world.decisions for world in worlds)
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            report(
                "deterministic",
                f"question {number} was answered {one}, in a second run {other}; let events alone decide.",
            )
            break
    return Played(sum(world.num_events for world in worlds), {"deterministic"} if first else frozenset())


def asking(make: Make, seed: int, report: Report) -> Played:
    """Questions whose victims stay: they can be found again, and be given again."""

    def as_asking(rule: str, message: str) -> None:
        report("raises_nothing" if rule == "raises_nothing" else "asking", f"asked again: {message}")

    world = World(make(CAPACITIES[3]), CAPACITIES[3], seed, report)
    try:
        for _ in range(NUM_STEPS // 4):
            world.admit(random_path(world.random, 9))
            first = world.ask(world.random.randint(1, 4))
            world._report = as_asking
            world.ask(world.random.randint(1, 6))
            world.seen.add("asking")
            for key in first:
                world.tell("on_hit", key, 0.0)
            world.ask(len(world.blocks))
            world._report = report
    except Broke:
        pass
    return Played(world.num_events, world.seen)


def chain(make: Make, seed: int, report: Report) -> Played:
    """One long sequence: nothing may go while it runs; then all of it may in one question, the last block first."""
    world = World(make(CHAIN), CHAIN, seed, report)
    blocks = [
        CachedBlock(BlockKey(depth), BlockKey(depth - 1) if depth > 1 else None, depth) for depth in range(1, CHAIN + 1)
    ]
    try:
        world.admit(blocks)
        world.ask(3)
        world.release(0)
        for victim in world.ask(CHAIN):
            world.remove(victim, evicted=True)
        world.admit(blocks)
    except Broke:
        pass
    return Played(world.num_events, world.seen)


def building(make: Make, seed: int, report: Report) -> Played:
    for capacity in (1, 1000):
        policy = make(capacity)
        if not (isinstance(name := getattr(policy, "name", None), str) and name):
            report("builds", f"its name is {name!r}; give the class a text `name`.")
    try:
        make(0)
    except PolicyError:
        pass
    except (Exception, SystemExit) as error:
        report("builds", f"capacity 0 raised {type(error).__name__}: {error}; raise PolicyError.")
    else:
        report("builds", "capacity 0 was accepted; raise PolicyError (EvictionPolicy.__init__ does).")
    return Played(0, {"builds"})


def bad_events(make: Make, seed: int, report: Report) -> Played:
    policy = make(4)
    block = CachedBlock(BlockKey(1))

    def refused(what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except PolicyError:
            return
        except (Exception, SystemExit) as error:
            report("bad_events", f"{what} raised {type(error).__name__}: {error}; raise PolicyError.")
        else:
            report("bad_events", f"{what} was accepted; raise PolicyError.")

    try:
        refused("a hit on a block that was never inserted", lambda: policy.on_hit(block.key))
        refused("the removal of a block that was never inserted", lambda: policy.on_remove(block.key))
        policy.on_insert(block)
        refused("the insertion of a block that is there", lambda: policy.on_insert(block))
        policy.on_remove(block.key)
        refused("a hit on a block that was removed", lambda: policy.on_hit(block.key))
        refused("a second removal", lambda: policy.on_remove(block.key))
    except (Exception, SystemExit) as error:
        report(
            "raises_nothing", f"inserting and removing one block raised {type(error).__name__}: {error}; it is allowed."
        )
        return Played(0, frozenset())
    return Played(7, {"bad_events"})


class _Unpinned:
    """A tier where nothing is held and nothing has a parent: as little as possible beside the policy."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.keys: set[BlockKey] = set()

    def access(self, number: int) -> None:
        key = BlockKey(number)
        if key in self.keys:
            self.policy.on_hit(key)
            return
        if len(self.keys) == self.capacity:
            decision = self.policy.select_victims(PolicyContext(1, self, incoming=(key,)))
            good = [
                victim for victim in getattr(decision, "victims", ()) if victim in self.keys
            ]  # "requests" judges others
            victim = BlockKey(good[0]) if good else next(iter(self.keys))
            self.keys.remove(victim)
            self.policy.on_remove(victim, True)
        self.keys.add(key)
        self.policy.on_insert(CachedBlock(key))

    def num_pins(self, key: BlockKey) -> int:
        if key not in self.keys:
            raise KeyError(key)
        return 0

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return None


class _Key(int):
    """A key that reports its deletion."""

    num_alive = 0

    def __init__(self, *value: object) -> None:
        _Key.num_alive += 1

    def __del__(self) -> None:
        _Key.num_alive -= 1

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return _Key, (int(self),)


def churn(make: Make, seed: int, report: Report) -> Played:
    """Insert new blocks without end, and check that memory levels off.

    A policy may hold several times the capacity, ghosts included. Counted are live keys, objects of the interpreter, and
    bytes of the C library. Growth counts only if all of the last phase is above all of the second one.
    """
    capacity = 24
    tier = _Unpinned(make(capacity), capacity)
    chance = random.Random(seed)
    measured: list[list[tuple[int, int]]] = []
    _Key.num_alive = 0
    gc.freeze()  # collecting is quick when it need not look at everything else in the process
    try:
        for _ in range(4):
            measured.append([])
            for place in range(CHURN):
                number = chance.getrandbits(64)
                # Some come back soon, some after they were evicted: the ways into a ghost list and out of it.
                tier.access(_Key(number if place % 3 else number % (4 * capacity)))
                if place % (CHURN // 3) == CHURN // 3 - 1:
                    gc.collect()
                    measured[-1].append((sys.getallocatedblocks(), _native_bytes()))
    except (Exception, SystemExit) as error:
        report("raises_nothing", f"a flow of new blocks raised {type(error).__name__}: {error}; it has to answer.")
        return Played(0, frozenset())
    finally:
        gc.unfreeze()
    if _Key.num_alive > 16 * capacity:
        report(
            "bounded",
            f"{_Key.num_alive} keys are held, {len(tier.keys)} of them on the tier; let those that left go.",
        )
    for column, what, slack in ((0, "objects", CHURN // 4), (1, "bytes of memory", 6 * CHURN)):
        growth = min(row[column] for row in measured[-1]) - max(row[column] for row in measured[1])
        if growth > slack:
            report("bounded", f"{growth} more {what} are held after {CHURN} more blocks left; let them go.")
    return Played(4 * CHURN, {"bounded"})


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


@cache
def _mallinfo() -> Callable[[], _MallInfo] | None:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform.startswith("linux") else None
    if found is not None:
        found.restype = _MallInfo
    return found


def _native_bytes() -> int:
    """Bytes that the C library has given out; 0 where it does not tell (glibc 2.33 and newer do)."""
    mallinfo = _mallinfo()
    if mallinfo is None:
        return 0
    info = mallinfo()
    return info.uordblks + info.hblkhd


SCENARIOS = {
    "building": Scenario(building),
    "bad_events": Scenario(bad_events),
    "requests": Scenario(requests, is_random=True),
    "asking": Scenario(asking, is_random=True),
    "chain": Scenario(chain),
    "twice": Scenario(twice),
    "churn": Scenario(churn),
}
