"""A made-up tier for the contract checks: blocks in trees, requests that hold them, and a judge of every answer."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sagellm.core.contract import Broke
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext

__all__ = ["World"]

MASK = 2**64 - 1


class World:
    """One tier around one policy. It answers the policy's questions, judges its answers and tells it events.

    A broken rule is reported by its name and repaired, so that the same scenario can find other faults.

    Args:
        report: called with the name of a rule and what was got and what is allowed.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int, seed: int, report: Callable[[str, str], None]) -> None:
        self.policy = policy
        self.capacity = capacity
        self.blocks: dict[BlockKey, CachedBlock] = {}
        self.running: list[list[BlockKey]] = []
        self.decisions: list[tuple[tuple[int, ...], tuple[str, ...]]] = []
        self.num_events = 0
        self.seen: set[str] = set()  # rules that could have been broken
        self.random = random.Random(seed)
        self._report = report
        self._num_pins: dict[BlockKey, int] = {}
        self._num_holders: dict[BlockKey, int] = {}  # requests alone
        self._num_below: dict[
            BlockKey, int
        ] = {}  # blocks of the tier that continue a block, which may not be there yet

    def num_pins(self, key: BlockKey) -> int:
        return self._num_pins[key]

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return self.blocks[key].parent

    def num_free(self) -> int:
        return self.capacity - len(self.blocks)

    def admit(self, path: Sequence[CachedBlock], incoming: str = "exact") -> None:
        """A request comes for these blocks, the first one first, and holds them from then on."""
        num_resident = next((place for place, block in enumerate(path) if block.key not in self.blocks), len(path))
        found = [block.key for block in path[:num_resident]]
        new = path[num_resident:]
        self.hold(found)
        for key in reversed(found):
            self.tell("on_hit", key, self._time_s())
        coming = [block.key for block in reversed(new)]
        while (short := len(new) - self.num_free()) > 0:
            for victim in self.ask(short, self._as_told(coming, incoming)):
                self.remove(victim, evicted=True)
            if len(new) > self.num_free():
                self.release(0)
        for block in reversed(new):
            self.insert(block)
        self.hold([block.key for block in new])
        self.running.append([block.key for block in path])

    def release(self, place: int) -> None:
        for key in self.running.pop(place):
            self._num_pins[key] -= 1
            self._num_holders[key] -= 1

    def hold(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._num_pins[key] += 1
            self._num_holders[key] += 1

    def insert(self, block: CachedBlock) -> None:
        block = block._replace(time_s=self._time_s())
        self.blocks[block.key] = block
        self._num_pins[block.key] = self._num_below.get(block.key, 0)
        self._num_holders[block.key] = 0
        self._count_below(block.parent, 1)
        self.tell("on_insert", block)

    def remove(self, key: BlockKey, evicted: bool) -> None:
        parent = self.blocks.pop(key).parent
        del self._num_pins[key], self._num_holders[key]
        self._count_below(parent, -1)
        self.tell("on_remove", key, evicted)

    def _count_below(self, parent: BlockKey | None, change: int) -> None:
        if parent is None:
            return
        self._num_below[parent] = self._num_below.get(parent, 0) + change
        if parent in self._num_pins:
            self._num_pins[parent] += change

    def unpinned(self) -> list[BlockKey]:
        return [key for key, num_pins in self._num_pins.items() if num_pins == 0]

    def num_obtainable(self) -> int:
        """Blocks that could go one after the other: a request holds all blocks above those that it holds."""
        return sum(num_holders == 0 for num_holders in self._num_holders.values())

    def tell(self, event: str, *arguments: Any) -> None:
        self.num_events += 1
        try:
            getattr(self.policy, event)(*arguments)
        except (Exception, SystemExit) as error:
            self._broke(f"{event}{arguments}", error)

    def ask(self, count: int, incoming: Sequence[BlockKey] = ()) -> list[BlockKey]:
        """Victims that may go, as many as wanted if there are that many: the policy's, and what those lack."""
        self.num_events += 1
        context = PolicyContext(count, self, incoming=incoming, time_s=self._time_s())
        try:
            decision = self.policy.select_victims(context)
        except (Exception, SystemExit) as error:
            self._broke(f"select_victims for {count} blocks, with {len(self.blocks)} on the tier,", error)
        if not isinstance(decision, EvictionDecision):
            self._report("answer", f"select_victims returned {decision!r}; return an EvictionDecision.")
            decision = EvictionDecision((), "", ())
        self.decisions.append((tuple(decision.victims), tuple(decision.reasons) or (decision.reason,)))
        wanted = min(count, self.num_obtainable())
        judge = PolicyContext(count, self)
        if wanted > 0:
            self.seen |= {"raises_nothing", "answer", "no_more", "enough"}
        if decision.victims:
            self.seen |= {"on_tier", "distinct", "unpinned", "reasons"}
        victims = self._judge(decision, count, judge)
        if len(victims) < wanted:
            self._report(
                "enough",
                f"{len(victims)} good victims where {count} were wanted and {wanted} blocks could go; give {wanted}.",
            )
        while len(victims) < wanted:
            victims.append(next(key for key in self.blocks if judge.is_evictable(key)))
            judge.take(victims[-1], "put right")
        return victims

    def _judge(self, decision: EvictionDecision, count: int, judge: PolicyContext) -> list[BlockKey]:
        victims: list[BlockKey] = []
        if len(decision.victims) > count:
            self._report("no_more", f"{len(decision.victims)} victims where {count} were wanted; give no more.")
        reasons = decision.reasons or [decision.reason] * len(decision.victims)
        if len(reasons) != len(decision.victims) or not all(isinstance(reason, str) and reason for reason in reasons):
            self._report("reasons", f"reasons {reasons!r} for {len(decision.victims)} victims; give one text for each.")
        for victim in decision.victims[:count]:
            if victim in victims:
                self._report("distinct", f"victim {victim} is named twice; name each once.")
            elif victim not in self.blocks:
                self._report(
                    "on_tier", f"victim {victim} is not on the tier; choose among blocks inserted and not removed."
                )
            elif not judge.is_evictable(BlockKey(victim)):
                why = f"has {self.num_pins(BlockKey(victim))} pins (requests and blocks below it) when its turn comes"
                self._report("unpinned", f"victim {victim} {why}; ask context.is_evictable before choosing it.")
            else:
                judge.take(BlockKey(victim), "judged")
                victims.append(BlockKey(victim))
        return victims

    def _as_told(self, coming: list[BlockKey], incoming: str) -> list[BlockKey]:
        """`exact`, or wrong in the ways in which an engine may be: it knows no better, or plans further."""
        if incoming == "longer":
            return coming + [BlockKey(self.random.getrandbits(64)) for _ in range(3)]
        return {"exact": coming, "empty": [], "shorter": coming[: len(coming) // 2]}[incoming]

    def _time_s(self) -> float:
        return self.num_events * 0.01

    def _broke(self, what: str, error: BaseException) -> NoReturn:
        self._report("raises_nothing", f"{what} raised {type(error).__name__}: {error}; it has to answer.")
        raise Broke from error
