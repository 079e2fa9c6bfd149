"""The plug-in that runs the books in an engine: its policies choose victims, which move to the host tier or go."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from sagellm.core.config import KVConfig
from sagellm.core.errors import PluginError
from sagellm.core.hooks import (
    BlockCounts,
    BlockId,
    EngineHandle,
    EvictionDecision,
    EvictionNotice,
    MigrationPlan,
    MigrationResult,
    Plugin,
    PrefixMatch,
    PrefixRelease,
    PrefixUpdate,
    StepResult,
    Tier,
    VictimRequest,
)
from sagellm.kv_policy import registry
from sagellm.kv_policy.base import BlockKey, EvictionPolicy, MigrationPolicy
from sagellm.kv_runtime.agreement import Agreement
from sagellm.kv_runtime.base import RoomDecision
from sagellm.kv_runtime.costs import Copies, Costs
from sagellm.kv_runtime.engine_blocks import EngineBlocks
from sagellm.kv_runtime.hierarchy import HierarchyManager
from sagellm.kv_runtime.quota import QuotaManager
from sagellm.kv_runtime.tier_spec import TierSpec

__all__ = ["TieredKV"]


class TieredKV(Plugin):
    """Chooses victims with the policies of `kv_policy`, and moves them from the pool to the host tier where that is worth it.

    Options are the fields of `KVConfig`. Notices keep the books, and the engine decides in doubt. Before an answer the
    victims and the number of unheld blocks are compared with the engine's. They differ if a notice was lost, or another
    plug-in moved blocks. Then the books are put right from the candidates, O(all of them), and the decision is made anew. A
    block that no notice named takes part under a key of its own.

    Blocks that leave the host tier are dropped at once, so that victims of the pool find its room in the same answer.
    """

    name = "tiered KV"
    make_policy: Callable[..., EvictionPolicy] | None = None  # by default by name, from the registry
    make_migration: Callable[..., MigrationPolicy | None] | None = None

    def __init__(self, **options: Any) -> None:
        try:
            self._config = KVConfig(**options)
        except ValidationError as error:
            raise PluginError(f"options of a KV plug-in: {error}") from None
        self._make_policy = type(self).make_policy or registry.make_policy
        self._make_migration = type(self).make_migration or registry.make_migration_policy
        # Tried here, where a mistake keeps the server from starting.
        self._migration = self._make_migration(self._config.migration)
        for name, own in self._policies():
            self._make_policy(name, 16, **own)
        self._counts: Counter[str] = Counter()
        self._returning: dict[BlockKey, None] = {}  # matched on the host; the engine brings them back to the pool
        self._costs = Costs()

    def _policies(self) -> list[tuple[str, dict[str, Any]]]:
        config = self._config
        return [(config.policy, config.policy_options), (config.cpu_policy, config.cpu_options)]

    def attach(self, engine: EngineHandle) -> None:
        self._engine = engine
        tiers = self._tiers()
        capacities = {spec.tier: spec.capacity for spec in tiers}
        origin = {
            "migration": {"name": self._config.migration, "options": {}}, "quotas": self._config.quotas,
            "block_size": engine.block_size, "block_bytes": engine.block_bytes,
        }  # fmt: skip
        self._manager = HierarchyManager(
            tiers, migration=self._migration, quota=QuotaManager(self._config.quotas, capacities),
            record=engine.record if engine.is_recording else None, make_policy=self._make_policy, origin=origin,
        )  # fmt: skip
        self._books = self._manager.books
        self._blocks = EngineBlocks(engine, self._manager, self._counts, self._forget_tokens)
        self._agreement = Agreement(self._blocks)

    def _tiers(self) -> list[TierSpec]:
        config, counts = self._config, self._engine.block_counts()
        tiers = [TierSpec(Tier.GPU, counts.total, config.policy, config.policy_options)]
        if counts.host_total:
            tiers.append(TierSpec(Tier.CPU, counts.host_total, config.cpu_policy, config.cpu_options))
        return tiers

    def report(self) -> dict[str, Any]:
        return {**self._manager.report(), "plugin": dict(self._counts)}

    def exchange_policy(self, tier: Tier, policy: str, options: dict[str, Any]) -> str:
        self._catch_up()
        return self._manager.exchange_policy(tier, policy, options, time.monotonic())

    # notices

    def on_prefix_matched(self, match: PrefixMatch) -> None:
        self._catch_up()
        keys = [BlockKey(key) for key in match.block_hashes.tolist()]
        if match.first and self._books.num_held(match.request_id):
            self._manager.released(match.request_id, 0, match.time_s)  # an earlier request of this name
        num_held = self._books.num_held(match.request_id)
        num_found = num_held + len(match.block_ids)
        known = self._known(match, num_held, keys[num_held:num_found])
        keys[num_held : num_held + len(known)] = known
        is_agreed = len(known) == len(match.block_ids) and self._books.num_resident(keys[: match.limit]) == num_found
        self._counts["lookups_disagreed"] += not is_agreed
        limit = match.limit if is_agreed else num_held + len(known)
        self._manager.looked_up(match.request_id, keys, limit, match.time_s)
        self._returning.update((key, None) for key in known if self._books.fast_tier(key) is Tier.CPU)

    def _known(self, match: PrefixMatch, first: int, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The keys under which the books know the blocks that the engine has found, up to one whose key collides.

        Those are the blocks' own keys, but for blocks that no notice had named when the books were put right.
        """
        known: list[BlockKey] = []
        for place, (block_id, key) in enumerate(zip(match.block_ids, keys, strict=True), first):
            named = self._blocks.key_of.get(block_id)
            if named is None or (named != key and named not in self._blocks.foreign):
                parent = known[-1] if known else self._books.held_at(match.request_id, place - 1)
                self._blocks.forget(block_id)
                if self._blocks.is_taken(key, block_id) or (parent is None and place):
                    break
                self._counts["blocks_found_unknown"] += 1
                if self._books.fast_tier(key) is None:
                    tier = self._engine.get_block_info([block_id])[0].tier
                    block = self._blocks.block(key, parent, place + 1, match.tenant_id, match.time_s)
                    self._manager.adopted([block], tier, match.time_s)
                if not self._books.is_child(key, parent):
                    break
                self._blocks.name(block_id, key)
                named = key
            known.append(named)
        return known

    def on_prefix_stored(self, update: PrefixUpdate) -> None:
        self._catch_up()
        depth = update.first_token // self._engine.block_size + 1
        parent = self._books.held_at(update.request_id, depth - 2)
        if parent is None and depth > 1:
            self._counts["stored_unknown"] += len(update.block_ids)
            return  # behind a block that the books do not know; both are seen when a victim is wanted
        blocks = []
        num_named = len(update.block_ids)
        digests = self._digests_of(update, parent)
        rows = zip(update.block_ids, update.block_hashes.tolist(), digests, strict=True)
        for place, (block_id, own, digest) in enumerate(rows):
            named = self._blocks.key_of.get(block_id)
            key = named if named is not None and named in self._blocks.foreign else BlockKey(own)
            if named != key or self._is_of_others(key, digest):
                self._blocks.forget(block_id)
                if self._blocks.is_taken(key, block_id) or self._is_of_others(key, digest):
                    num_named = min(num_named, place)
            blocks.append(self._blocks.block(key, parent, depth + place, update.tenant_id, update.time_s))
            parent = key
        num_refused = len(self._manager.stored(update.request_id, blocks[:num_named], update.time_s))
        named_blocks = blocks[: num_named - num_refused]
        for block_id, block, digest in zip(update.block_ids, named_blocks, digests, strict=False):
            self._blocks.name(block_id, block.key)
            self._set_digest(block.key, digest)

    def _digests_of(self, update: PrefixUpdate, parent: BlockKey | None) -> Sequence[bytes]:
        """Digests of all tokens up to each block's end, for a plug-in with a disk tier; empty if unknown.
        `parent`: the name of the block before the first."""
        return [b""] * len(update.block_ids)

    def _is_of_others(self, key: BlockKey, digest: bytes) -> bool:
        """For a plug-in with a disk tier: whether the key stands for other tokens."""
        return False

    def _set_digest(self, key: BlockKey, digest: bytes) -> None:
        """For a plug-in with a disk tier: the engine has just told which tokens the block of gpu with this name holds."""

    def _forget_tokens(self, keys: Sequence[BlockKey]) -> None:
        """For a plug-in with a disk tier: these keys name no block of the engine any more."""

    def on_prefix_released(self, release: PrefixRelease) -> None:
        self._catch_up()
        self._manager.released(release.request_id, release.num_kept, release.time_s)

    def on_evicted(self, notice: EvictionNotice) -> None:
        self._catch_up()
        for block_id in notice.block_ids:  # those that were given up by our own answer have no name any more
            self._blocks.forget(block_id, evicted=True)

    def on_step_end(self, result: StepResult) -> None:
        self._costs.add(result)

    def _calibrate(self) -> None:
        """Fit the cost model to what was measured, now and then; to be called before it is asked."""
        model = getattr(self._migration, "model", None)
        if model is not None and (text := self._costs.fitted(type(model), self._copies())):
            self._manager.calibrated(text)
            self._counts["calibrations"] += 1

    def _copies(self) -> Copies:
        """By name of the link, (bytes, seconds) of copies that were measured elsewhere than in steps."""
        return {}

    # the decision

    def select_victims(self, request: VictimRequest) -> EvictionDecision:
        self._catch_up()
        now_s = time.monotonic()
        counts = self._engine.block_counts()
        self._calibrate()
        if not self._agreement.is_in_step(counts):
            self._agreement.put_right(request, now_s)
        self._look_at_host(counts, now_s)
        room = self._manager.make_room(Tier.GPU, request.count, (), now_s)
        if self._agreement.is_stale(room, Tier.GPU):
            self._agreement.put_right(request, now_s)
            self._look_at_host(counts, now_s)
            room = self._manager.make_room(Tier.GPU, request.count, (), now_s)
            if self._agreement.is_stale(room, Tier.GPU):
                self._counts["answers_withheld"] += 1
                return EvictionDecision((), "the books do not agree with the engine")
        chosen = self._follow(room, now_s)
        return EvictionDecision(tuple(chosen), self._manager.tiers[0].policy, tuple(chosen.values()))

    def _look_at_host(self, counts: BlockCounts, now_s: float) -> None:
        """Tell the books of places on the host that the engine cannot give to anyone before its next pass."""
        if counts.host_total:
            num_free = self._manager.num_free(Tier.CPU) + self._manager.num_occupied(Tier.CPU)
            self._manager.occupied(Tier.CPU, max(num_free - (counts.host_total - counts.host_used), 0), now_s)

    def _follow(self, room: RoomDecision, now_s: float) -> dict[BlockId, str]:
        """Make room below, then move what is to move. Returns which blocks of the pool are left for the engine to give up, and
        why, children before parents."""
        chosen: dict[BlockId, str] = {}
        self._drop_files([key for tier, key, _ in room.drop if tier is Tier.NVME], now_s)
        # All at once: of those with a file already and those that get one some continue others.
        from_host = {key: reason for tier, key, reason in room.drop if tier is Tier.CPU}
        for plan in room.demote:
            if plan.dst_tier is Tier.NVME:
                saved = [BlockKey(key) for key in plan.block_ids]
                self._save(saved, now_s)
                from_host.update(dict.fromkeys(saved, "moved to nvme"))
        self._drop_from_host(list(from_host), list(from_host.values()), now_s)
        self._give_up([(key, reason) for tier, key, reason in room.drop if tier is Tier.GPU], now_s, chosen)
        for plan in room.demote:
            if plan.dst_tier is Tier.CPU:
                self._offload(plan, [BlockKey(key) for key in plan.block_ids], now_s, chosen)
        return chosen

    def _offload(self, plan: MigrationPlan, keys: Sequence[BlockKey], now_s: float, chosen: dict[BlockId, str]) -> None:
        ids = {self._blocks.id_of[key]: key for key in keys}
        moves = MigrationPlan(plan.src_tier, plan.dst_tier, tuple(ids))
        result = self._engine.migrate_blocks(moves)
        moved = tuple(ids[BlockId(block)] for block in result.moved)
        refused = {ids[BlockId(block)]: why for block, why in result.refused.items()}
        self._manager.moved(plan, MigrationResult(moved, dict(refused)), now_s)
        for key, why in refused.items():
            # A moved block that continues a dropped one could not be found any more.
            below = self._books.below(key, Tier.CPU)
            reason = f"continues a block that could not be moved: {why}"
            self._drop_from_host(below, [reason] * len(below), now_s)
            self._give_up([(key, f"could not be moved: {why}")], now_s, chosen)

    def _give_up(self, rows: Sequence[tuple[BlockKey, str]], now_s: float, chosen: dict[BlockId, str]) -> None:
        """Blocks of the pool, with reasons, are part of the answer."""
        for key, reason in rows:
            chosen[self._blocks.id_of[key]] = reason
        self._blocks.gone(Tier.GPU, [key for key, _ in rows], now_s)

    def _drop_from_host(self, keys: Sequence[BlockKey], reasons: Sequence[str], now_s: float) -> None:
        """Blocks of the host leave the engine now; one that it does not let go of stays in the books."""
        if not keys:
            return
        dropped = self._engine.drop_blocks([self._blocks.id_of[key] for key in keys], reasons)
        by_tier: dict[Tier, list[BlockKey]] = {Tier.CPU: [], Tier.GPU: []}
        for key in (self._blocks.key_of[BlockId(block)] for block in dropped if BlockId(block) in self._blocks.key_of):
            tier = self._books.fast_tier(key)
            if tier is not None:
                by_tier[tier].append(key)
        self._counts["drops_refused"] += len(set(keys).difference(by_tier[Tier.CPU]))
        for tier, gone in by_tier.items():
            self._blocks.gone(tier, gone, now_s)

    def _drop_files(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """For a plug-in with a disk tier."""

    def _save(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """For a plug-in with a disk tier: begin to write the blocks, which are about to leave the host tier."""

    def _catch_up(self) -> None:
        """Tell the books what the engine has brought back since the last call."""
        if not self._returning:
            return
        ids = [self._blocks.id_of[key] for key in self._returning if key in self._blocks.id_of]
        infos = self._engine.get_block_info(ids)
        back = [self._blocks.key_of[info.block_id] for info in infos if info.tier is Tier.GPU]
        if back:
            plan = MigrationPlan(Tier.CPU, Tier.GPU, tuple(back))
            self._manager.moved(plan, MigrationResult(tuple(back), {}), time.monotonic())
        self._returning = {
            key: None
            for key in self._returning
            if self._books.fast_tier(key) is Tier.CPU and self._books.num_locks(key)
        }
