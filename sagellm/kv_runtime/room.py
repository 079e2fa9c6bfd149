"""How a tier gives up blocks: whose quota goes first, what the policy says, what moves down, what goes with it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sagellm.core.errors import PolicyError
from sagellm.core.hooks import EvictionDecision, MigrationPlan, Tier
from sagellm.kv_policy.base import (
    AccessHistory,
    BlockKey,
    BlockView,
    EvictionPolicy,
    MigrationContext,
    MigrationDecision,
    MigrationPolicy,
    MigrationPurpose,
    PolicyContext,
    PoolStats,
    check_decision,
)
from sagellm.kv_runtime.base import RoomDecision
from sagellm.kv_runtime.blocks import BlockManager
from sagellm.kv_runtime.quota import QuotaManager

TOPPED_UP = "least recently used, as the policy chose too few"
ORPHANED = "continues a block that is given up"
HAS_COPY = "a copy lies on the next tier"


class TierLimits(NamedTuple):
    """How many blocks a tier has room for, and what is below it."""

    capacity: int
    lower: Tier | None


class _Leaving(BlockView):
    """A tier as it will be once some blocks have left; those count as pinned, since they cannot be taken again."""

    def __init__(self, books: BlockManager, tier: Tier, leaving: Mapping[BlockKey, str]) -> None:
        self._view = books.view(tier)
        self._leaving = leaving
        parents = (books.block(key).parent for key in leaving)
        self._unpinned = Counter(parent for parent in parents if parent is not None)

    def num_pins(self, key: BlockKey) -> int:
        pins = self._view.num_pins(key)
        return pins + 1 if key in self._leaving else pins - self._unpinned[key]

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return self._view.parent_of(key)


class _Stats:
    """Counts the blocks of one tier, when a policy asks."""

    def __init__(self, room: "RoomMaker", tier: Tier) -> None:
        self._room = room
        self._tier = tier

    def pool_stats(self) -> PoolStats:
        return self._room.pool_stats(self._tier)

    def tenant_stats(self) -> dict[str, int]:
        return self._room.tenant_stats(self._tier)

    def access_history(self, key: BlockKey) -> tuple[float, ...]:
        return self._room.history[self._tier].of(key)


class RoomMaker:
    """Answers one question after the other; changes no books. O(victims + blocks passed over + tenants with a quota)."""

    def __init__(
        self, books: BlockManager, limits: Mapping[Tier, TierLimits], policies: Mapping[Tier, EvictionPolicy],
        migration: MigrationPolicy | None, quota: QuotaManager, arriving: Mapping[Tier, int], occupied: Mapping[Tier, int],
        history: Mapping[Tier, AccessHistory],
    ) -> None:  # fmt: skip
        self._books = books
        self._limits = limits
        self._policies = policies
        self._migration = migration
        self._quota = quota
        self._arriving = arriving
        self._occupied = occupied
        self.history = history
        self._stats = {tier: _Stats(self, tier) for tier in limits}

    def num_free(self, tier: Tier) -> int:
        """Negative where more is on its way than there is room for."""
        num_taken = self._books.num_blocks(tier) + self._arriving[tier] + self._occupied[tier]
        return self._limits[tier].capacity - num_taken

    def pool_stats(self, tier: Tier) -> PoolStats:
        capacity, free = self._limits[tier].capacity, self.num_free(tier)
        pinned = sum(self._books.num_pins(key, tier) > 0 for key in self._books.recency(tier))
        return PoolStats(capacity, capacity - free, free, pinned)

    def tenant_stats(self, tier: Tier) -> dict[str, int]:
        return self._books.tenants(tier)

    def decide(self, tier: Tier, count: int, incoming: Sequence[BlockKey], time_s: float) -> RoomDecision:
        victims = self._choose(tier, count, incoming, time_s, {})
        demote: list[MigrationPlan] = []
        drop: list[tuple[Tier, BlockKey, str]] = []
        self._send_down(tier, victims, time_s, demote, drop)
        return RoomDecision(tuple(demote), tuple(drop), tuple(victims.items()))

    # who goes

    def _choose(
        self, tier: Tier, count: int, incoming: Sequence[BlockKey], time_s: float, leaving: Mapping[BlockKey, str],
        arriving: Mapping[str, int] | None = None,
    ) -> dict[BlockKey, str]:  # fmt: skip
        """Victims in their order, with reasons. All of what tenants have above their quota goes, even beyond `count`.

        `leaving`: blocks that go anyway; `arriving`: blocks that come, by tenant.
        """
        chosen = self._over_quota(tier, leaving, arriving or {})
        missing = count - len(chosen)
        if missing <= 0:
            return chosen
        view = self._view(tier, leaving, chosen)

        def question() -> PolicyContext:
            return PolicyContext(
                missing, view, tier=tier, incoming=incoming[len(chosen) :], time_s=time_s, stats=self._stats[tier]
            )

        policy = self._policies[tier]
        try:
            answer = policy.select_victims(question())
            if not isinstance(answer, EvictionDecision):
                raise PolicyError(f"select_victims answered {answer!r}; it must answer an EvictionDecision.")
            decision = check_decision(answer, question())
        except PolicyError:
            raise
        except Exception as error:  # a policy of others may raise anything
            raise PolicyError(
                f"policy {_name(policy)} failed in select_victims: {type(error).__name__}: {error}"
            ) from error
        chosen |= dict(zip(decision.victims, decision.reasons, strict=True))
        if len(chosen) < count:
            rest = PolicyContext(count - len(chosen), self._view(tier, leaving, chosen), tier=tier)
            rest.take_in_order(self._books.recency(tier), lambda _: TOPPED_UP)
            chosen |= dict.fromkeys(rest.decision().victims, TOPPED_UP)
        return chosen

    def _over_quota(
        self, tier: Tier, leaving: Mapping[BlockKey, str], arriving: Mapping[str, int]
    ) -> dict[BlockKey, str]:
        """The least recently used blocks of tenants that have too many, as many as they have too many."""
        chosen: dict[BlockKey, str] = {}
        for tenant, excess in self._excesses(tier, leaving, arriving):
            reason = f"tenant {tenant} has more than its {self._quota.limit(tenant, tier)} blocks"
            context = PolicyContext(excess, self._view(tier, leaving, chosen), tier=tier)
            context.take_in_order(self._books.recency(tier, tenant), lambda _, reason=reason: reason)
            chosen |= dict.fromkeys(context.decision().victims, reason)
        return chosen

    def _excesses(
        self, tier: Tier, leaving: Mapping[BlockKey, str], arriving: Mapping[str, int]
    ) -> list[tuple[str, int]]:
        gone = Counter(self._books.block(key).tenant_id for key in leaving) if leaving else {}
        rows = []
        for tenant in self._quota.tenants(tier):
            excess = self._quota.excess(tenant, tier, arriving.get(tenant, 0) - gone.get(tenant, 0))
            if excess:
                rows.append((tenant, excess))
        return rows

    def _view(self, tier: Tier, *leaving: Mapping[BlockKey, str]) -> BlockView:
        together = {key: reason for each in leaving for key, reason in each.items()}
        return _Leaving(self._books, tier, together) if together else self._books.view(tier)

    # where to

    def _send_down(
        self, tier: Tier, victims: dict[BlockKey, str], time_s: float, demote: list[MigrationPlan],
        drop: list[tuple[Tier, BlockKey, str]],
    ) -> None:  # fmt: skip
        """Append to `demote` and `drop` what becomes of these victims, and of the blocks below that make way for them."""
        lower = self._limits[tier].lower
        orphans: dict[BlockKey, str] = {}
        kept: dict[BlockKey, None] = {}
        if lower is not None and victims:
            kept = self._worth_a_move(tier, lower, list(victims), time_s)
            way = self._make_way(tier, lower, victims, kept, orphans, time_s)
            if lower is Tier.CPU:  # a file of an orphan is of use once what it continues was computed again
                way = {**orphans, **way}
            self._send_down(lower, way, time_s, demote, drop)
            if kept:
                demote.append(MigrationPlan(tier, lower, tuple(kept)))
        for key, reason in victims.items():
            if key not in kept:
                has_copy = lower is Tier.NVME and self._books.is_on(key, lower)
                drop.append((tier, key, f"{reason}; {HAS_COPY}" if has_copy else reason))

    def _worth_a_move(self, tier: Tier, lower: Tier, keys: list[BlockKey], time_s: float) -> dict[BlockKey, None]:
        """Those of the victims to move, in their order; none below a dropped one, where it could not be found."""
        blocks = tuple(self._books.block(key) for key in keys if not self._books.is_on(key, lower))
        kept = dict.fromkeys(block.key for block in blocks)
        if self._migration is not None and blocks:
            context = MigrationContext(MigrationPurpose.DEMOTE, tier, lower, blocks, time_s=time_s)
            kept = dict.fromkeys(check_migration(self._migration, context).plan.block_ids)
        if lower is not Tier.NVME:
            victims = set(keys)
            for key in reversed(keys):  # a parent stands behind its children
                parent = self._books.block(key).parent
                if key in kept and parent in victims and parent not in kept:
                    del kept[key]
        return kept

    def _make_way(
        self, tier: Tier, lower: Tier, victims: dict[BlockKey, str], kept: dict[BlockKey, None],
        orphans: dict[BlockKey, str], time_s: float,
    ) -> dict[BlockKey, str]:  # fmt: skip
        """Victims of the lower tier that make way for `kept`; for what finds no room there, `kept` gets shorter.

        If blocks of the asked tier are dropped, blocks on cpu that continue them are dropped too.
        """

        def orphan(keys: list[BlockKey]) -> None:
            if tier is Tier.GPU and self._books.num_blocks(Tier.CPU):
                for key in keys:
                    orphans.update(dict.fromkeys(self._books.below(key, Tier.CPU), ORPHANED))

        orphan([key for key in victims if key not in kept])
        leaving = orphans if lower is Tier.CPU else {}
        free = self.num_free(lower)
        tenants = Counter(self._books.block(key).tenant_id for key in kept)
        short = len(kept) - free - len(leaving)
        way = self._choose(lower, short, tuple(kept), time_s, leaving, tenants)
        for tenant, excess in self._excesses(lower, {**leaving, **way}, tenants):
            own = [key for key in kept if self._books.block(key).tenant_id == tenant][:excess]
            self._give_up_with_below(own, kept, lower)
        orphan([key for key in victims if key not in kept])
        while kept and len(kept) > free + len({**leaving, **way}):
            orphan([self._give_up_first(kept)])
        for key in orphans.keys() & way.keys():
            del orphans[key]
        return way

    def _give_up_first(self, kept: dict[BlockKey, None]) -> BlockKey:
        """Drop a victim: the first one with the least loss.

        A block with a file is the first choice. The next is a block that no file continues: such a file would be of no use
        without it. No block of `kept` or of cpu may continue either. Otherwise it is the first victim: children stand before
        their parents, so no block of `kept` continues it.
        """
        books, parents = self._books, {self._books.block(key).parent for key in kept}
        alone = [key for key in kept if key not in parents and not books.has_below(key, Tier.CPU)]
        in_files = (key for key in alone if books.is_on(key, Tier.NVME))
        at_ends = (key for key in alone if not books.has_below(key, Tier.NVME))
        key = next(in_files, None) or next(at_ends, None) or next(iter(alone or kept))
        del kept[key]
        return key

    def _give_up_with_below(self, keys: list[BlockKey], kept: dict[BlockKey, None], lower: Tier) -> None:
        gone = set(keys)
        for key in reversed(kept):
            if lower is not Tier.NVME and self._books.block(key).parent in gone:
                gone.add(key)
        for key in gone:
            del kept[key]


def check_migration(policy: MigrationPolicy, context: MigrationContext) -> MigrationDecision:
    """Return the decision of the migration policy, if it can be carried out.

    Raises:
        PolicyError: it failed, or names a block that was not asked for, or for a load not the first ones in their order.
    """
    try:
        decision = policy.plan(context)
        keys = tuple(BlockKey(int(key)) for key in decision.plan.block_ids)
        decision = MigrationDecision(
            MigrationPlan(context.src_tier, context.dst_tier, keys), float(decision.net_benefit), str(decision.reason)
        )
    except PolicyError:
        raise
    except Exception as error:  # a policy of others may raise anything
        raise PolicyError(f"migration policy {_name(policy)} failed: {type(error).__name__}: {error}") from error
    asked = [block.key for block in context.blocks]
    chosen = set(keys)
    is_load = context.purpose is MigrationPurpose.LOAD
    expected = asked[: len(keys)] if is_load else [key for key in asked if key in chosen]
    if list(keys) != expected:
        raise PolicyError(
            f"migration policy {_name(policy)} chose {len(keys)} of {len(asked)} blocks; it must name blocks that were "
            "asked for, once, in their order, and for a load the first ones."
        )
    return decision


def _name(policy: object) -> str:
    return str(getattr(policy, "name", type(policy).__name__))
