"""One set of books over the tiers gpu, cpu and nvme: events in, decisions out, the same in an engine and in a replay."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from sagellm.core.errors import PolicyError
from sagellm.core.hooks import MigrationPlan, MigrationResult, RequestId, Tier
from sagellm.kv_policy import registry
from sagellm.kv_policy.base import (
    BlockKey,
    CachedBlock,
    EvictionPolicy,
    MigrationContext,
    MigrationPolicy,
    MigrationPurpose,
)
from sagellm.kv_runtime.base import FetchDecision, RoomDecision, TieredBackendProtocol
from sagellm.kv_runtime.blocks import BlockManager
from sagellm.kv_runtime.lines import kind_of, line_fields
from sagellm.kv_runtime.placement import Placement
from sagellm.kv_runtime.quota import QuotaManager
from sagellm.kv_runtime.room import RoomMaker, TierLimits, check_migration
from sagellm.kv_runtime.tier_spec import TierSpec, check_tiers, tier_row

__all__ = ["HierarchyManager"]

FORMAT = 2  # of the lines that are recorded

MakePolicy = Callable[..., EvictionPolicy]  # (name, capacity, **options)


class HierarchyManager:
    """Knows where every block is, and decides who makes way for whom and what is worth bringing back.

    Events say what has happened (`looked_up`, `stored`, `released`, `dropped`, `moved`, `saving`, `saved`, `loading`,
    `loaded`, `failed`, `occupied`, `adopted`, `corrected`, `calibrated`, `exchange_policy`). Decisions say what should happen
    (`make_room`, `fetch`). A decision changes no books until events say that it was followed. Nothing here reads a clock or a
    random number, so the same events give the same decisions, as long as the policies keep to that. One thread at a time.

    Costs: an event O(blocks named), a decision O(victims + blocks passed over), plus what the policies take.

    Args:
        tiers: fastest first; gpu among them.
        backend: whose blocks these are; only `carry_out` asks it for anything.
        migration: what is worth a move; None for always.
        quota: limits by tenant; None for none.
        record: is told every event and every decision, once it is through, as `record(event, **fields)`. None saves some
        microseconds each.
        make_policy: builds the eviction policies; default: by name, from `sagellm.kv_policy`.
        origin: what else belongs in the first line of the record, for who builds this manager again.

    Raises:
        PolicyError: tiers in another order or twice, no gpu, no room; an unknown policy; from any decision, a policy that
            failed or answered nonsense. From then on the manager must not be used.
    """

    def __init__(
        self, tiers: Sequence[TierSpec], backend: TieredBackendProtocol | None = None, *,
        migration: MigrationPolicy | None = None, quota: QuotaManager | None = None,
        record: Callable[..., None] | None = None, make_policy: MakePolicy | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.tiers = [TierSpec(Tier(spec[0]), *spec[1:]) for spec in tiers]
        check_tiers(self.tiers)
        self.backend = backend
        self.books = BlockManager()
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()  # (tier, reason without its numbers) of victims
        self.quota = quota or QuotaManager({}, {spec.tier: spec.capacity for spec in self.tiers})
        self._migration = migration
        self._learn = getattr(migration, "observe_use", None)
        self._record = record
        self._make = make_policy or registry.make_policy
        self._policies = {spec.tier: self._make(spec.policy, spec.capacity, **spec.options) for spec in self.tiers}
        self._place = Placement(self.books, self._policies, self.quota)
        self._num_occupied = dict.fromkeys(Tier, 0)
        lower = [spec.tier for spec in self.tiers[1:]] + [None]
        limits = {spec.tier: TierLimits(spec.capacity, below) for spec, below in zip(self.tiers, lower, strict=True)}
        self._room = RoomMaker(
            self.books, limits, self._policies, migration, self.quota, self._place.num_arriving, self._num_occupied,
            self._place.history,
        )
        if record is not None:
            record("kv_open", format=FORMAT, tiers=[tier_row(spec) for spec in self.tiers], **(origin or {}))

    def num_free(self, tier: Tier) -> int:
        """Blocks for which the tier has room, those on their way there taken off; negative where it has none for these."""
        return self._room.num_free(tier)

    def num_occupied(self, tier: Tier) -> int:
        """As `occupied` has said."""
        return self._num_occupied[tier]

    def is_arriving(self, key: BlockKey) -> bool:
        """Whether the block is being saved or loaded."""
        return key in self._place.arriving

    # events

    def looked_up(self, request_id: RequestId, keys: Sequence[BlockKey], limit: int, time_s: float) -> int:
        """A request was looked up; it holds what was found from now on. Returns how many of its first blocks it holds.

        `keys`: of its full blocks; `limit`: how many of these could be found. Blocks of cpu are among those found: the
        engine brings them back before it uses them, and `moved` says so.
        """
        keys = keys[: max(limit, 0)]
        num_held = self.books.num_held(request_id)
        num_found = self.books.num_resident(keys)
        found = keys[num_held:num_found]
        self.books.lock(request_id, num_held, found)
        for key in reversed(found):
            tier = self.books.fast_tier(key)
            assert tier is not None
            self._place.hit(key, tier, time_s)
        self._observe_use(found, time_s)
        self.counts["lookups"] += 1
        self.counts["blocks_asked"] += len(keys)
        self.counts["blocks_found"] += len(found)
        self._write(
            "lookup", request=request_id, keys=keys, limit=limit, time_s=time_s, resident=num_found, found=len(found)
        )
        return num_found

    def stored(
        self, request_id: RequestId | None, blocks: Sequence[CachedBlock], time_s: float
    ) -> tuple[BlockKey, ...]:
        """Blocks of gpu are in the cache now, consecutive ones of one sequence; the request, if there is one, holds them.

        One that is there already stays; one that was on cpu is on gpu from now on. Returns the keys that were refused: a
        key that names another block, and what follows it.
        """
        places = {block.key: place for place, block in reversed(list(enumerate(blocks)))}
        num_taken = next(
            (place for place, block in enumerate(blocks) if places[block.key] < place or self.books.collides(block)),
            len(blocks),
        )
        for block in reversed(blocks[:num_taken]):
            tier = self.books.fast_tier(block.key)
            if tier is None:
                self._place.insert(block, Tier.GPU)
            elif tier is not Tier.GPU:
                self._place.shift(block.key, tier, Tier.GPU)
        if request_id is not None and num_taken:
            self.books.lock(request_id, blocks[0].depth - 1, [block.key for block in blocks[:num_taken]])
        self._observe_use([block.key for block in blocks[:num_taken]], time_s)
        refused = tuple(block.key for block in blocks[num_taken:])
        self.counts["collisions"] += len(refused) > 0
        self._write("stored", request=request_id, blocks=blocks, time_s=time_s, refused=refused)
        return refused

    def released(self, request_id: RequestId, num_kept: int, time_s: float) -> None:
        """The request lets go of all but its first blocks. One that holds nothing may say so."""
        num_released = len(self.books.release(request_id, num_kept))
        self._write("released", request=request_id, num_kept=num_kept, time_s=time_s, released=num_released)

    def dropped(self, tier: Tier, keys: Sequence[BlockKey], time_s: float, *, evicted: bool = True) -> None:
        """Blocks were dropped from the tier. `evicted`: to make room, not because they were invalid or came twice."""
        num_unknown = 0
        for key in keys:
            if self.books.is_on(key, tier):
                self._place.remove(key, tier, evicted=evicted)
            else:
                num_unknown += 1
        self.counts[f"dropped_{tier.value}"] += len(keys) - num_unknown
        self._write("dropped", tier=tier, keys=keys, time_s=time_s, evicted=evicted, unknown=num_unknown)

    def moved(self, plan: MigrationPlan, result: MigrationResult, time_s: float) -> None:
        """Blocks went from gpu to cpu (to make room) or back; `plan.block_ids` and those of the result are keys.

        Those that moved are told to the slower tier as they come, to the faster one deepest first.
        """
        is_down = plan.src_tier is Tier.GPU
        keys = [BlockKey(key) for key in result.moved if self.books.is_on(key, plan.src_tier)]
        for key in keys if is_down else reversed(keys):
            self._place.shift(key, plan.src_tier, plan.dst_tier, evicted=is_down)
        pair = f"{plan.src_tier.value}_{plan.dst_tier.value}"
        self.counts[f"moved_{pair}"] += len(keys)
        self.counts[f"refused_{pair}"] += len(result.refused)
        self._write(
            "moved", src=plan.src_tier, dst=plan.dst_tier, keys=result.moved, time_s=time_s, refused=result.refused
        )

    def saving(self, keys: Sequence[BlockKey], time_s: float) -> None:
        """Copies of blocks of gpu or cpu are on their way to nvme, which keeps room for them."""
        for key in keys:
            if key in self.books and not self.books.is_on(key, Tier.NVME):
                self._place.begin_arrival(key, Tier.NVME)
        self._write("saving", keys=keys, time_s=time_s)

    def saved(self, keys: Sequence[BlockKey], time_s: float) -> None:
        """The copies are on nvme; their blocks may have left their own tier meanwhile."""
        self._place.arrive(keys, Tier.NVME)
        self.counts["saved"] += len(keys)
        self._write("saved", keys=keys, time_s=time_s)

    def loading(self, keys: Sequence[BlockKey], time_s: float) -> None:
        """Blocks of nvme are read, to be on cpu; that keeps room for them, and nvme keeps the files."""
        for key in reversed(keys):
            if self._slow_tier(key) is Tier.NVME and key not in self._place.arriving:
                self._place.hit(key, Tier.NVME, time_s)
                self.books.begin_read(key)
                self._place.begin_arrival(key, Tier.CPU)
        self._write("loading", keys=keys, time_s=time_s)

    def loaded(self, keys: Sequence[BlockKey], time_s: float) -> None:
        """Loaded blocks can be found on cpu; their files stay."""
        self._place.arrive(keys, Tier.CPU)
        self.counts["loaded"] += len(keys)
        self._write("loaded", keys=keys, time_s=time_s)

    def failed(self, keys: Sequence[BlockKey], reason: str, time_s: float) -> None:
        """Blocks that were being saved or loaded did not arrive."""
        for key in keys:
            arriving = self._place.arriving.get(key)
            if arriving is not None:
                self._place.end_arrival(key)
                self.counts["failed_saves" if arriving[0] is Tier.NVME else "failed_loads"] += 1
        self._write("failed", keys=keys, reason=reason, time_s=time_s)

    def occupied(self, tier: Tier, count: int, time_s: float) -> None:
        """So many places of the tier are busy without a block of the books, since bytes are being copied out of them. In
        place of what was said before."""
        if count != self._num_occupied[tier]:
            self._num_occupied[tier] = count
            self._write("occupied", tier=tier, count=count, time_s=time_s)

    def adopted(self, blocks: Sequence[CachedBlock], tier: Tier, time_s: float) -> None:
        """Blocks are on a tier that the books did not know of: files of an earlier run, foreign blocks of an engine."""
        for block in blocks:
            if not self.books.is_on(block.key, tier) and not self.books.collides(block):
                if tier is Tier.NVME or self.books.fast_tier(block.key) is None:
                    self._place.insert(block, tier)
        self._write("adopted", blocks=blocks, tier=tier, time_s=time_s)

    def corrected(self, locked: Sequence[BlockKey], unlocked: Sequence[BlockKey], time_s: float) -> None:
        """The engine's word against the books': `locked` are in use for reasons unknown, `unlocked` are not in use."""
        for key in unlocked:
            self.books.unlock_all(key)
        for key in locked:
            self.books.lock(RequestId(-1), self.books.num_held(RequestId(-1)), [key])
        self.counts["corrected"] += len(locked) + len(unlocked)
        self._write("corrected", locked=locked, unlocked=unlocked, time_s=time_s)

    def calibrated(self, model: str) -> None:
        """The cost model of the migration policy, as JSON, fits what was measured better than the one it had."""
        before = getattr(self._migration, "model", None)
        if before is not None:
            after = type(before).from_json(model)
            after.lifetime = before.lifetime
            self._migration.model = after
            self._write("calibrated", model=model)

    def exchange_policy(self, tier: Tier, policy: str, options: Mapping[str, Any], time_s: float) -> str:
        """Let another eviction policy choose on the tier from now on; return the name of the former one.

        The new policy learns of every block of the tier, least recently used first. O(blocks of the tier).

        Raises:
            PolicyError: no such tier or policy, invalid options, or the policy failed. The former policy goes on then.
        """
        place = next((place for place, spec in enumerate(self.tiers) if spec.tier is tier), None)
        if place is None:
            names = ", ".join(spec.tier.value for spec in self.tiers)
            raise PolicyError(f"there is no tier {tier.value} here; the tiers are {names}.")
        former = self.tiers[place]
        try:
            made = self._make(policy, former.capacity, **options)
            self._place.exchange_policy(tier, made, time_s)
        except PolicyError:
            raise
        except Exception as error:  # a policy of others may raise anything
            raise PolicyError(f"policy {policy} failed to take over: {type(error).__name__}: {error}") from error
        self.tiers[place] = TierSpec(tier, former.capacity, policy, dict(options))
        self.counts["policies_exchanged"] += 1
        self._write(
            "exchanged", tier=tier, policy=policy, options=dict(options), time_s=time_s, former=former.policy,
            num_blocks=self.books.num_blocks(tier),
        )  # fmt: skip
        return former.policy

    # decisions

    def make_room(
        self, tier: Tier, count: int, incoming: Sequence[BlockKey] = (), time_s: float = 0.0
    ) -> RoomDecision:  # fmt: skip
        """Give up `count` blocks of the tier, or all that may go, and all that a tenant has above its quota.

        Each moves to the next tier if the migration policy finds that worth it and there is room or can be; otherwise it
        is dropped.
        """
        decision = self._room.decide(Tier(tier), count, incoming, time_s)
        for _, reason in decision.victims:
            self.reasons[tier.value, kind_of(reason)] += 1
        self._write(
            "room", tier=tier, count=count, incoming=incoming, time_s=time_s, victims=decision.victims,
            demote=decision.demote, drop=decision.drop,
        )  # fmt: skip
        return decision

    def fetch(
        self, request_id: RequestId, keys: Sequence[BlockKey], num_resident: int, time_s: float, num_running: int = 0,
        queued_bytes: int = 0,
    ) -> FetchDecision:  # fmt: skip
        """Which blocks behind the first `num_resident` of a sequence to bring back, from cpu to gpu and from nvme to cpu."""
        chosen: list[BlockKey] = []
        tiers: list[Tier] = []
        benefit, reason, place = 0.0, "nothing more on a slower tier", num_resident
        while place < len(keys) and (segment := self._segment(keys, place)):
            source = self._slow_tier(keys[place])
            num_loaded, segment_s, why = self._worth_loading(source, segment, time_s, num_running, queued_bytes)
            benefit += segment_s
            chosen += keys[place : place + num_loaded]
            tiers += [source] * num_loaded
            place += len(segment)
            if num_loaded < len(segment):
                reason = why or "the rest is not worth it"
                self.counts["loads_avoided"] += len(segment) - num_loaded
                break
        self._write(
            "fetch", request=request_id, keys=keys, num_resident=num_resident, time_s=time_s, num_running=num_running,
            queued_bytes=queued_bytes, chosen=len(chosen), tiers=tiers, net_benefit_s=benefit, reason=reason,
        )  # fmt: skip
        return FetchDecision(tuple(chosen), tuple(tiers), benefit, reason)

    def _segment(self, keys: Sequence[BlockKey], first: int) -> tuple[CachedBlock, ...]:
        """The longest run of blocks from place `first` on that lie on one slower tier, none of them on its way."""
        source = self._slow_tier(keys[first])
        blocks: list[CachedBlock] = []
        for key in keys[first:]:
            if source is None or self._slow_tier(key) is not source or key in self._place.arriving:
                break
            blocks.append(self.books.block(key))
        return tuple(blocks)

    def _worth_loading(
        self, source: Tier, blocks: tuple[CachedBlock, ...], time_s: float, num_running: int, queued_bytes: int
    ) -> tuple[int, float, str]:
        if self._migration is None:
            return len(blocks), 0.0, ""
        target = Tier.GPU if source is Tier.CPU else Tier.CPU
        num_before = (blocks[0].depth - 1) * blocks[0].num_tokens
        context = MigrationContext(
            MigrationPurpose.LOAD, source, target, blocks, num_before, queued_bytes, num_running, time_s,
            num_free=max(self.num_free(target), 0) if target in self._policies else None,
        )  # fmt: skip
        decision = check_migration(self._migration, context)
        return len(decision.plan.block_ids), decision.net_benefit, decision.reason

    def _slow_tier(self, key: BlockKey) -> Tier | None:
        tier = self.books.fast_tier(key)
        if tier is None and self.books.is_on(key, Tier.NVME):
            return Tier.NVME
        return None if tier is Tier.GPU else tier

    # following a decision

    def carry_out(self, room: RoomDecision, time_s: float, deadline_s: float = 1.0) -> None:
        """Follow a decision on the backend: drop, move, wait for copies, and update the books. Drop what does not move.

        Raises:
            RuntimeError: the manager was built without a backend.
        """
        if self.backend is None:
            raise RuntimeError("a decision is carried out on a backend; this manager was built without one")
        for tier, drops in groupby(room.drop, key=lambda each: each[0]):
            self._drop(tier, [key for _, key, _ in drops], time_s)
        for plan in room.demote:
            if plan.dst_tier is Tier.NVME:
                self._save(self.backend, plan, time_s, deadline_s)
                continue
            result = self.backend.migrate(plan)
            self.moved(plan, result, time_s)
            # The blocks below a dropped block are dropped with it; its own children came before it.
            for key in (BlockKey(key) for key in result.refused):
                self._drop(plan.dst_tier, self.books.below(key, plan.dst_tier), time_s)
                self._drop(plan.src_tier, [key], time_s)

    def _drop(self, tier: Tier, keys: Sequence[BlockKey], time_s: float) -> None:
        if keys and self.backend is not None:
            self.backend.drop(tier, keys)
            self.dropped(tier, keys, time_s)

    def _save(self, backend: TieredBackendProtocol, plan: MigrationPlan, time_s: float, deadline_s: float) -> None:
        keys = [BlockKey(key) for key in plan.block_ids]
        self.saving(keys, time_s)
        result = backend.save(keys, plan.dst_tier, deadline_s).result()
        self.saved([BlockKey(key) for key in result.moved], time_s)
        for key, reason in result.refused.items():
            self.failed([BlockKey(key)], reason, time_s)
        self._drop(plan.src_tier, keys, time_s)

    def report(self) -> dict[str, Any]:
        """Numbers under names, nested by label: what the tiers hold, events, and why blocks had to go."""
        books, tiers = self.books, [spec.tier for spec in self.tiers]
        victims: dict[str, dict[str, int]] = {}
        for (tier, reason), count in sorted(self.reasons.items()):
            victims.setdefault(tier, {})[reason] = count
        return {
            "capacity_blocks": {spec.tier.value: spec.capacity for spec in self.tiers},
            "blocks": {tier.value: books.tenants(tier) for tier in tiers},  # by tenant
            "bytes": {tier.value: books.num_bytes(tier) for tier in tiers},
            "arriving_blocks": {tier.value: self._place.num_arriving[tier] for tier in tiers},
            "events": dict(self.counts),
            "victims": victims,
            "quota_violations": self.quota.violations(),
        }

    def _observe_use(self, keys: Sequence[BlockKey], time_s: float) -> None:
        """Some migration policies learn from which blocks come back."""
        if self._learn is not None and keys:
            self._learn(keys, time_s)

    def _write(self, event: str, **fields: Any) -> None:
        if self._record is not None:
            self._record(f"kv_{event}", **line_fields(fields))
