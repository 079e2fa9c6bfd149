"""A replay over several tiers: the books and policies that serve in the engine, and a backend in memory.

Blocks that leave gpu move down as the migration policy decides. Blocks that a request finds on a slower tier are brought
back before use. Otherwise the rules are those of the replay on one tier, without room for answers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sagellm.core.errors import ConfigError, PolicyError
from sagellm.core.hooks import MigrationPlan, RequestId, Tier
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.replay.base import MAX_BLOCKS, PrefixCounts, Trace, num_blocks, shortened
from sagellm.replay.evictions import Evictions
from sagellm.replay.policies import BELADY, Contestant

if TYPE_CHECKING:
    from sagellm.kv_runtime.hierarchy import HierarchyManager
    from sagellm.kv_runtime.simulated_backend import SimulatedBackend

DEFAULT_TOKEN_BYTES = 12_288  # 24 layers, 2 KV heads of 64, keys and values, 16 bits each: Qwen2.5-0.5B


class TieredCounts(NamedTuple):
    """`counts`: hits are blocks found on any tier. `loaded_blocks`: by slower tier, int64 [r], of those the ones from there.
    `moved_bytes`: by "src-dst"."""

    counts: PrefixCounts
    loaded_blocks: dict[str, np.ndarray]
    moved_bytes: dict[str, int]


def parse_tiers(text: str) -> dict[Tier, int]:
    """Blocks by tier from `gpu:1000,cpu:5000,nvme:20000`.

    Raises:
        ConfigError: malformed, not in this order, no gpu, or nvme without cpu, through which its blocks come back.
    """
    found: dict[Tier, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition(":")
        if name not in [tier.value for tier in Tier] or num_blocks(number) is None:
            raise ConfigError(
                f"tiers {shortened(text)}: {shortened(part)} is not tier:blocks, with gpu, cpu or nvme and at least 1 block, "
                f"at most {MAX_BLOCKS}."
            )
        if Tier(name) in found:
            raise ConfigError(f"tiers {text!r}: {name} is there twice.")
        found[Tier(name)] = num_blocks(number)
    if list(found) != list(Tier)[: len(found)]:
        raise ConfigError(f"tiers {text!r}: give gpu, then cpu, then nvme; each slower tier needs the one before it.")
    return found


def build_manager(
    trace: Trace, contestant: Contestant, tiers: Mapping[Tier, int], *, migration: str, reference: bool, token_bytes: int
) -> tuple["HierarchyManager", "SimulatedBackend"]:  # fmt: skip
    """Books over these tiers, with one policy of the contestant's kind on each, and their backend.

    Raises:
        PolicyError: an unknown migration policy.
        ConfigError: Belady, whose future is that of one tier.
    """
    from sagellm.kv_policy.registry import make_migration_policy
    from sagellm.kv_runtime.hierarchy import HierarchyManager
    from sagellm.kv_runtime.simulated_backend import SimulatedBackend
    from sagellm.kv_runtime.tier_spec import TierSpec

    build = contestant.build
    if build is None:
        raise ConfigError(f"policy {BELADY} knows the future of one tier only; leave it out with --tiers.")
    block_bytes = token_bytes * trace.block_size
    backend = SimulatedBackend(dict(tiers), block_size=trace.block_size, block_bytes=block_bytes)
    manager = HierarchyManager(
        [TierSpec(tier, capacity, contestant.name, contestant.options) for tier, capacity in tiers.items()], backend,
        migration=None if migration == "always" else make_migration_policy(migration),
        make_policy=lambda name, capacity, **options: build(capacity),
    )  # fmt: skip
    return manager, backend


class TieredReplay:
    """Requests over the tiers of a manager.

    Args:
        manager, backend: as from `build_manager`, fresh.
        capacity: blocks of gpu.
        running: requests at a time, each holding its blocks.
        soon: as in a replay on one tier; an eviction leaves gpu, to a slower tier or entirely. None: capacity.
    """

    def __init__(
        self, trace: Trace, manager: "HierarchyManager", backend: "SimulatedBackend", *, capacity: int, running: int = 1,
        soon: int | None = None,
    ) -> None:  # fmt: skip
        self._trace, self._manager, self._backend = trace, manager, backend
        self._capacity, self._max_running = capacity, running
        self._running: list[RequestId] = []
        self._hits = np.zeros(trace.num_requests, np.int32)
        self._loaded = {tier.value: np.zeros(trace.num_requests, np.int64) for tier in (Tier.CPU, Tier.NVME)}
        self._evictions = Evictions(capacity if soon is None else soon)
        self._num_oversized = 0
        self._time_s = 0.0

    def run(self, on_progress: Callable[[int], None] | None = None) -> TieredCounts:
        """Raises PolicyError: a policy failed or answered nonsense."""
        for index in range(self._trace.num_requests):
            try:
                self._admit(RequestId(index))
            except PolicyError as error:
                raise PolicyError(f"request {index}: {error}") from error
            if on_progress is not None:
                on_progress(index + 1)
        moved = {f"{src.value}-{dst.value}": count for (src, dst), count in self._backend.moved_bytes.items()}
        counts = PrefixCounts(
            self._hits, num_evicted=self._evictions.num_evicted, num_evicted_soon=self._evictions.num_soon,
            num_oversized=self._num_oversized,
        )  # fmt: skip
        return TieredCounts(counts, self._loaded, moved)

    def _admit(self, request: RequestId) -> None:
        trace, manager = self._trace, self._manager
        keys: list[BlockKey] = trace.keys[trace.offsets[request] : trace.offsets[request + 1]].tolist()
        self._time_s = float(trace.times_s[request])
        self._evictions.num_accesses += len(keys)
        self._num_oversized += len(keys) > self._capacity
        keys = keys[: self._capacity]
        while len(self._running) >= self._max_running:
            self._end_first()
        read = self._read_files(request, keys)
        num_found = manager.looked_up(request, keys, len(keys), self._time_s)
        num_hits = self._bring_back(request, keys[:num_found], read)
        if num_hits < num_found:
            manager.released(request, num_hits, self._time_s)
        self._hits[request] = num_hits
        new = keys[num_hits:]
        self._make_gpu_room(len(new), new[::-1])
        self._backend.put(new)
        manager.stored(request, self._blocks(request, keys, num_hits), self._time_s)
        self._arrived(new)
        self._running.append(request)

    def _read_files(self, request: RequestId, keys: list[BlockKey]) -> frozenset[BlockKey]:
        """Bring to cpu what continues the prefix on nvme and is worth it. Returns what came."""
        manager, backend = self._manager, self._backend
        if not backend.capacity(Tier.NVME):
            return frozenset()
        num_fast = manager.books.num_resident(keys)
        wanted = manager.fetch(request, keys, num_fast, self._time_s, num_running=len(self._running))
        files = [key for key, tier in zip(wanted.keys, wanted.tiers, strict=True) if tier is Tier.NVME]
        if not files:
            return frozenset()
        manager.loading(files, self._time_s)
        self._ask_for_room(Tier.CPU, min(-manager.num_free(Tier.CPU), len(files)), files[::-1])
        result = backend.load(files, Tier.CPU, np.inf).result()
        backend.commit_loads()
        manager.loaded([BlockKey(key) for key in result.moved], self._time_s)
        for key, reason in result.refused.items():
            manager.failed([BlockKey(key)], reason, self._time_s)
        return frozenset(BlockKey(key) for key in result.moved)

    def _bring_back(self, request: RequestId, found: list[BlockKey], read: frozenset[BlockKey]) -> int:
        """Move to gpu what of the blocks found is on cpu. Returns how many leading ones are on gpu then."""
        manager = self._manager
        away = [key for key in found if not manager.books.is_on(key, Tier.GPU)]
        if not away:
            return len(found)
        self._make_gpu_room(len(away), away[::-1])
        plan = MigrationPlan(Tier.CPU, Tier.GPU, tuple(away))
        result = self._backend.migrate(plan)
        manager.moved(plan, result, self._time_s)
        for key in result.moved:
            self._loaded["nvme" if key in read else "cpu"][request] += 1
        self._arrived([BlockKey(key) for key in result.moved])
        return next((place for place, key in enumerate(found) if not manager.books.is_on(key, Tier.GPU)), len(found))

    def _make_gpu_room(self, need: int, incoming: Sequence[BlockKey]) -> None:
        while (short := need - self._manager.num_free(Tier.GPU)) > 0:
            self._ask_for_room(Tier.GPU, short, incoming)
            if need <= self._manager.num_free(Tier.GPU) or not self._running:
                return
            self._end_first()

    def _ask_for_room(self, tier: Tier, count: int, incoming: Sequence[BlockKey]) -> None:
        if count <= 0:
            return
        room = self._manager.make_room(tier, count, incoming, self._time_s)
        self._manager.carry_out(room, self._time_s, np.inf)
        if tier is Tier.GPU:
            self._evictions.left([key for key, _ in room.victims])

    def _arrived(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._evictions.came(key)

    def _end_first(self) -> None:
        self._manager.released(self._running.pop(0), 0, self._time_s)

    def _blocks(self, request: RequestId, keys: list[BlockKey], first: int) -> list[CachedBlock]:
        trace = self._trace
        tenant = trace.tenants[request] if trace.tenants else ""
        return [
            CachedBlock(
                keys[place], keys[place - 1] if place else None, place + 1, trace.block_size, self._backend.block_bytes,
                tenant_id=tenant, time_s=self._time_s,
            )
            for place in range(first, len(keys))
        ]  # fmt: skip
