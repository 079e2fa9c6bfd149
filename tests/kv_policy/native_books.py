"""Plain books of one tier, and the replay of prefixes on them, written from its description alone."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionPolicy, PolicyContext, check_decision


class Books:
    """What is on the tier, who continues whom, and who holds what. A `BlockView`."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.holders: Counter[int] = Counter()

    def num_pins(self, key: BlockKey) -> int:
        self.parents[key]
        return self.holders[key] + sum(parent == key for parent in self.parents.values())

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        parent = self.parents[key]
        return None if parent is None else BlockKey(parent)


class Running(NamedTuple):
    request: int
    admission: int
    held: list[int]
    outputs: list[int]  # one number, which grows


class PlainReplay:
    """Attributes of the result as those of `PrefixReplayResult`; `told` are the events in order, `victims` who went."""

    def __init__(
        self,
        policy: EvictionPolicy,
        rows: Sequence[Sequence[int]],
        running: int = 1,
        outputs: Sequence[int] = (),
        soon: int | None = None,
    ) -> None:
        self.policy, self.rows, self.limit, self.outputs = policy, rows, running, outputs
        self.capacity = policy.capacity
        self.soon = policy.capacity if soon is None else soon
        self.books, self.running, self.queue = Books(), [], []
        self.clock = self.admissions = 0
        self.evicted_at: dict[int, int] = {}
        self.victims: list[int] = []
        self.hit_blocks, self.retries = [0] * len(rows), [0] * len(rows)
        self.retry_hit_blocks, self.retry_blocks = [0] * len(rows), [0] * len(rows)
        self.num_evicted = self.num_evicted_soon = self.num_preempted = self.num_oversized = 0
        for request, row in enumerate(rows):
            self._retry()
            self.num_oversized += len(row) > self.capacity
            self.hit_blocks[request] = self._admit(request)
        self._retry()

    @property
    def num_free(self) -> int:
        return self.capacity - len(self.books.parents) - sum(own.outputs[0] for own in self.running)

    def _retry(self) -> None:
        while self.queue:
            request = self.queue.pop(0)
            self.retries[request] += 1
            self.retry_blocks[request] += len(self.rows[request])
            self.retry_hit_blocks[request] += self._admit(request)

    def _admit(self, request: int) -> int:
        if len(self.running) == self.limit:
            self._stop(0)
        self.clock += len(self.rows[request])
        keys = list(self.rows[request][: self.capacity])
        hits = 0
        while hits < len(keys) and keys[hits] in self.books.parents:
            hits += 1
        self.books.holders.update(keys[:hits])
        for key in reversed(keys[:hits]):
            self.policy.on_hit(BlockKey(key))
        while (short := len(keys) - hits - self.num_free) > 0:
            self._evict(short, keys[hits:][::-1])
            if len(keys) - hits > self.num_free:
                self._stop(0)
        for place in range(len(keys) - 1, hits - 1, -1):
            self._insert(keys, place)
        self.books.holders.update(keys[hits:])
        self.admissions += 1
        self.running.append(Running(request, self.admissions, keys, [0]))
        if self.outputs:
            self._grow()
        return hits

    def _insert(self, keys: list[int], place: int) -> None:
        key, parent = keys[place], keys[place - 1] if place else None
        if key in self.evicted_at and self.clock - self.evicted_at.pop(key) < self.soon:
            self.num_evicted_soon += 1
        self.policy.on_insert(CachedBlock(BlockKey(key), None if parent is None else BlockKey(parent), place + 1))
        self.books.parents[key] = parent

    def _evict(self, count: int, incoming: Sequence[int]) -> None:
        incoming = [BlockKey(key) for key in incoming]
        decision = self.policy.select_victims(PolicyContext(count, self.books, incoming=incoming))
        check_decision(decision, PolicyContext(count, self.books))
        assert all(decision.reasons) and len(decision.reasons) == len(decision.victims)
        for key in decision.victims:
            self.policy.on_remove(key, evicted=True)
            del self.books.parents[key]
            self.evicted_at[key] = self.clock
        self.num_evicted += len(decision.victims)
        self.victims += decision.victims

    def _stop(self, place: int) -> Running:
        own = self.running.pop(place)
        self.books.holders.subtract(own.held)
        return own

    def _grow(self) -> None:
        for own in list(self.running):
            age = self.admissions - own.admission
            target = -(-self.outputs[own.request] * age // self.limit)
            while own in self.running and (short := target - own.outputs[0] - self.num_free) > 0:
                self._evict(short, [])
                if target - own.outputs[0] > self.num_free:
                    others = [place for place, other in enumerate(self.running) if other is not own]
                    gone = self._stop(others[-1] if others else 0)
                    self.queue.append(gone.request)
                    self.num_preempted += 1
            if own in self.running and target > own.outputs[0]:
                own.outputs[0] = target
