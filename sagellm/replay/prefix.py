"""A replay with prefix semantics, in plain Python: requests with locks, retries and room for their answers, on one tier.

It works with any `EvictionPolicy` and is the twin of the native replay. README.md states the rules; the numbers in comments
are theirs.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm.core.errors import CapacityError, PolicyError, TraceError
from sagellm.kv_policy.base import (
    AccessHistory,
    BlockKey,
    CachedBlock,
    EvictionPolicy,
    PolicyContext,
    PoolStats,
    check_decision,
)
from sagellm.replay.base import PrefixCounts
from sagellm.replay.evictions import Evictions

ROUNDS = 16  # of retries in which no request ends; after that they preempt each other in a circle
SPARE_RETRIES = 64


@dataclass(slots=True)
class _Resident:
    """A block on the tier. `pins`: running requests that hold it, and resident blocks that continue it."""

    parent: BlockKey | None
    pins: int
    tenant: str


@dataclass(slots=True, eq=False)
class _Running:
    """A request that is admitted: `keys` it holds, its output blocks now and in the end, admissions since its own."""

    index: int
    keys: list[BlockKey]
    final_output: int
    output: int = 0
    age: int = 0


class PrefixReplay:
    """One tier, its policy and the requests that run. `num_pins` and `parent_of` make it the policy's `BlockView`.

    Args:
        policy: fresh; told every event.
        keys: uint64 [n]; offsets: int64 [r + 1]; see `Trace`.
        capacity: blocks of the tier, at least 1.
        running: requests at a time, at least 1.
        output_blocks: int32 [r], blocks that each answer needs; None for none.
        times_s: float64 [r], passed on to the policy; None for 0.
        soon: an eviction counts as premature if the block is inserted again before that many further accesses; None: capacity.
        block_tokens, block_bytes: tokens of a block, and bytes of its keys and values, for policies that look at them.
        tenants: one a request, or empty.
    """

    def __init__(
        self, policy: EvictionPolicy, keys: NDArray[np.uint64], offsets: NDArray[np.int64], *, capacity: int, running: int = 1,
        output_blocks: NDArray[np.int32] | None = None, times_s: NDArray[np.float64] | None = None, soon: int | None = None,
        block_tokens: int = 1, block_bytes: int = 1, tenants: Sequence[str] = (),
    ) -> None:  # fmt: skip
        if capacity < 1 or running < 1:
            raise CapacityError(
                f"capacity {capacity}, running {running}: at least one block and one request are needed."
            )
        self._policy = policy
        self._tell_request: Callable[[int], None] = getattr(policy, "on_request", lambda index: None)
        self._keys, self._offsets = keys, offsets
        self._capacity, self._max_running = capacity, running
        self._outputs = None if output_blocks is None else output_blocks.tolist()
        self._times = None if times_s is None else times_s.tolist()
        self._block_tokens, self._block_bytes, self._tenants = block_tokens, block_bytes, tenants
        self._resident: dict[BlockKey, _Resident] = {}
        self._history = AccessHistory()
        self._running: list[_Running] = []  # in order of admission
        self._retries: deque[int] = deque()
        self._output_held = 0
        self._num_evictable = 0  # resident blocks without pins
        self._num_ended = 0
        self._evictions = Evictions(capacity if soon is None else soon)
        self._hit_blocks = np.zeros(len(offsets) - 1, np.int32)
        self._counts: Counter[str] = Counter()  # by field of `PrefixCounts`

    def num_pins(self, key: BlockKey) -> int:
        return self._resident[key].pins

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return self._resident[key].parent

    def pool_stats(self) -> PoolStats:
        free = self._num_free()
        return PoolStats(self._capacity, self._capacity - free, free, len(self._resident) - self._num_evictable)

    def tenant_stats(self) -> dict[str, int]:
        return dict(Counter(block.tenant for block in self._resident.values()))

    def access_history(self, key: BlockKey) -> tuple[float, ...]:
        return self._history.of(key)

    def check(self) -> None:
        """Assert what always holds: the tier is not overfull, every pin has its reason, a block's parent is there too."""
        assert len(self._resident) + self._output_held <= self._capacity
        assert self._output_held == sum(request.output for request in self._running)
        pins = Counter(key for request in self._running for key in request.keys)
        pins.update(block.parent for block in self._resident.values() if block.parent is not None)
        assert pins == {key: block.pins for key, block in self._resident.items() if block.pins}
        assert self._num_evictable == sum(not block.pins for block in self._resident.values())

    def run(self, on_progress: Callable[[int], None] | None = None) -> PrefixCounts:
        """All requests. `on_progress` is told how many were admitted for the first time.

        Raises:
            PolicyError: the policy named blocks that it may not have, or too few.
            TraceError: a key is there twice in a request, or under two parents.
            CapacityError: requests preempt each other without end.
        """
        for index in range(len(self._offsets) - 1):
            self._empty_retries()
            self.admit(index)
            if on_progress is not None:
                on_progress(index + 1)
        self._empty_retries()
        while self._running:
            self._end(self._running[0])
        return PrefixCounts(
            self._hit_blocks, num_evicted=self._evictions.num_evicted, num_evicted_soon=self._evictions.num_soon, **self._counts
        )  # fmt: skip

    def admit(self, index: int, is_retry: bool = False) -> None:
        """Rules 1 to 6 for one request."""
        try:
            self._admit(index, is_retry)
        except PolicyError as error:
            raise PolicyError(f"request {index}: {error}") from error

    def _admit(self, index: int, is_retry: bool) -> None:
        self._tell_request(index)
        keys: list[BlockKey] = self._keys[self._offsets[index] : self._offsets[index + 1]].tolist()
        num_asked = len(keys)
        if num_asked > self._capacity:  # 1
            self._counts["num_oversized"] += not is_retry
            keys = keys[: self._capacity]
        while len(self._running) >= self._max_running:  # 2
            self._end(self._running[0])
        num_hits = self._look_up(keys, index)  # 3
        self._evictions.num_accesses += num_asked
        if is_retry:
            self._counts.update(retries=1, retry_hit_blocks=num_hits, retry_blocks=num_asked)
        else:
            self._hit_blocks[index] = num_hits
        new = keys[num_hits:]
        self._make_room(len(new), new[::-1], index)  # 4
        self._insert(keys, num_hits, index)  # 5
        for other in self._running:
            other.age += 1
        self._running.append(_Running(index, keys, 0 if self._outputs is None else self._outputs[index]))
        if self._outputs is not None:
            self._grow_all(index)  # 6

    def _empty_retries(self) -> None:
        in_vain = 0
        while self._retries:
            num_ended = self._num_ended
            self.admit(self._retries.popleft(), is_retry=True)
            in_vain = in_vain + 1 if self._num_ended == num_ended else 0
            if in_vain > ROUNDS * (len(self._retries) + len(self._running) + SPARE_RETRIES):
                raise CapacityError(
                    f"requests preempt each other without end: with {self._max_running} running at a time their answers do not "
                    f"fit in {self._capacity} blocks; raise the capacity or lower --running."
                )

    def _time(self, index: int) -> float:
        return 0.0 if self._times is None else self._times[index]

    def _look_up(self, keys: list[BlockKey], index: int) -> int:
        resident, time_s = self._resident, self._time(index)
        num_hits = next((place for place, key in enumerate(keys) if key not in resident), len(keys))
        for key in reversed(keys[:num_hits]):
            self._pin(key)
            self._policy.on_hit(key, time_s)
            if self._history.is_kept:
                self._history.note(key, time_s)
        return num_hits

    def _make_room(self, need: int, incoming: Sequence[BlockKey], index: int) -> None:
        while (short := need - self._num_free()) > 0:
            self._evict(short, incoming, index)
            if need <= self._num_free():
                return
            # A request has no more blocks than the tier, so there is room once it is the only one.
            self._end(self._running[0])

    def _num_free(self) -> int:
        return self._capacity - len(self._resident) - self._output_held

    def _evict(self, count: int, incoming: Sequence[BlockKey], index: int) -> None:
        """Ask for `count` victims and remove them; fewer, if no more may go."""
        time_s = self._time(index)
        ask = PolicyContext(count, self, incoming=incoming, time_s=time_s, stats=self)
        decision = self._policy.select_victims(ask)
        victims = check_decision(decision, PolicyContext(count, self)).victims
        for key in victims:
            parent = self._resident.pop(BlockKey(key)).parent
            self._num_evictable -= 1
            if parent in self._resident:
                self._unpin(parent)
            self._policy.on_remove(BlockKey(key), True)
            if self._history.is_kept:
                self._history.forget(BlockKey(key))
        self._evictions.left(victims)
        if len(victims) < count and self._num_evictable:
            raise PolicyError(
                f"policy {self._policy.name} gave {len(victims)} of {count} victims though {self._num_evictable} more blocks "
                "may go; it must choose as many as are wanted, or all there are."
            )

    def _pin(self, key: BlockKey) -> None:
        block = self._resident[key]
        self._num_evictable -= not block.pins
        block.pins += 1

    def _unpin(self, key: BlockKey) -> None:
        block = self._resident[key]
        block.pins -= 1
        self._num_evictable += not block.pins

    def _insert(self, keys: list[BlockKey], num_hits: int, index: int) -> None:
        resident = self._resident
        tenant = self._tenants[index] if self._tenants else ""
        for place in range(len(keys) - 1, num_hits - 1, -1):
            key, parent = keys[place], keys[place - 1] if place else None
            if key in resident:
                raise TraceError(
                    f"request {index}: block {key} is there already, under another parent or twice in the request."
                )
            resident[key] = _Resident(parent, 1 + (place + 1 < len(keys)), tenant)
            block = CachedBlock(
                key, parent, place + 1, self._block_tokens, self._block_bytes, tenant_id=tenant, time_s=self._time(index)
            )  # fmt: skip
            self._policy.on_insert(block)
            self._evictions.came(key)
        if 0 < num_hits < len(keys):
            self._pin(keys[num_hits - 1])

    def _end(self, request: _Running) -> None:
        self._let_go(request)
        self._num_ended += 1

    def _let_go(self, request: _Running) -> None:
        self._running.remove(request)
        for key in request.keys:
            self._unpin(key)
        self._output_held -= request.output

    def _grow_all(self, index: int) -> None:
        for request in tuple(self._running):
            if request in self._running:
                self._grow(request, index)

    def _grow(self, request: _Running, index: int) -> None:
        target = -(-request.final_output * request.age // self._max_running)
        while (short := target - request.output - self._num_free()) > 0:
            self._evict(short, (), index)
            if target - request.output <= self._num_free():
                break
            others = [other for other in self._running if other is not request]
            last = others[-1] if others else request
            self._preempt(last)
            if last is request:
                return
        self._output_held += target - request.output
        request.output = target

    def _preempt(self, request: _Running) -> None:
        self._let_go(request)
        self._retries.append(request.index)
        self._counts["num_preempted"] += 1


def replay_prefix_reference(*arguments: Any, on_progress: Callable[[int], None] | None = None, **options: Any) -> PrefixCounts:
    """Build a `PrefixReplay` of these arguments, and return what its `run` counts."""
    return PrefixReplay(*arguments, **options).run(on_progress)
