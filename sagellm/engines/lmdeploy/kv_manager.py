"""LMDeploy's block pool as the contract sees it: information, victims, and migration to a host tier and back.

A block has three names. Its id is LMDeploy's logical block, which requests and the prefix cache hold. A slot of the pool
holds its bytes, and a slot of the host cache does after an offload. Migration changes the slot, not the id.

Copies are not made here. They ride with the inputs of the next forward pass, which executes them, outs before ins, before
it reads or writes any block. Two rules keep that order harmless: a block restored since the last pass is not offloaded
again, and a host slot freed by a restore is not handed out before that pass was sent.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sagellm.core.answers import check_choice, foreign_victims, orphaned
from sagellm.core.errors import PluginError, PrefixIndexError
from sagellm.core.hooks import (
    BlockCounts,
    BlockState,
    EvictionDecision,
    EvictionNotice,
    EvictionReason,
    KVBlockInfo,
    MigrationPlan,
    MigrationResult,
    PrefixCandidate,
    Tier,
    VictimRequest,
)
from sagellm.core.host import PluginHost
from sagellm.engines.lmdeploy.host_blocks import HostBlocks
from sagellm.engines.lmdeploy.host_memory import BlockBytes, HostCache, open_host_cache
from sagellm.engines.lmdeploy.pool_backend import LMDeployPool
from sagellm.engines.lmdeploy.prefix_cache import BlockIds, PrefixCache
from sagellm.prefix_reuse.base import TIERS

BUILT_IN = "lru"
ABOVE_WENT = "the block above it went"


class KVManager:
    """Owned by one scheduler; called on the engine's thread, or on a plug-in's while the engine waits for it."""

    def __init__(self, scheduler: Any, host: PluginHost, cache: PrefixCache, block_bytes: int) -> None:
        self._host = host
        self._cache = cache
        self._allocator = scheduler.block_manager.allocator
        self._pool = self._allocator.get_phy_allocator("gpu")
        self._pool_slots = scheduler.block_manager.num_gpu_blocks
        self._host_slots = scheduler.block_manager.num_cpu_blocks
        self.block_size = scheduler.cache_config.block_size
        self.block_bytes = block_bytes
        self.num_blocks = self._allocator._log_mem.num_blocks()  # of the pool and the host tier together
        self.cache_engine: Any = None  # LMDeploy's, where it is in this process; set once the engine is built
        self.host_blocks = HostBlocks(scheduler, cache, block_bytes, self._open_host_memory)
        self.pool = LMDeployPool(scheduler, self)
        self.ending: Any = None  # LMDeploy's session whose end plug-ins are told of now
        self.tenant_of: dict[int, str] = {}  # cached block -> the tenant that computed it, where it has a name
        self._num_sent = 0
        self._outs: dict[int, int] = {}  # pool slot -> host slot, to be copied with the next pass
        self._ins: dict[int, int] = {}  # host slot -> pool slot
        self._callbacks: list[tuple[str, Callable[[EvictionNotice], None]]] = []
        self.evicted = {reason: 0 for reason in EvictionReason}
        self.migrated = {Tier.CPU: 0, Tier.GPU: 0}

    def _open_host_memory(self) -> HostCache:
        return open_host_cache(self.cache_engine, self._host_slots, self.block_bytes)

    # ---- information

    def num_free(self) -> int:
        return self._pool._free_count

    def counts(self) -> BlockCounts:
        unlocked = self._cache.unlocked()
        if self._host_slots:
            unlocked &= self._allocator._log_mem.phy_map < self._pool_slots
        cached = int(np.count_nonzero(unlocked))
        free = self.num_free()
        host_used = self._host_slots - self._allocator.get_phy_allocator("cpu").get_num_free_blocks()
        active = self._pool_slots - free - cached
        return BlockCounts(self._pool_slots, free, cached, active, self._host_slots, host_used)

    def info(self, block_ids: Sequence[int] | None = None) -> list[KVBlockInfo]:
        """Raises PluginError for an id that is no block."""
        memory = self._allocator._log_mem
        if block_ids is None:
            ids = memory.ref_count.nonzero()[0]
        else:
            ids = np.asarray(block_ids, dtype=np.int64)
            if ids.size and not 0 <= ids.min() <= ids.max() < memory.num_blocks():
                raise PluginError(f"block ids {ids.tolist()}: allowed are 0 to {memory.num_blocks() - 1}.")
        uncached = ids[(memory.ref_count[ids] > 0) & ~self._cache.is_cached[ids]]
        held = self.pool.tenants_of(uncached.tolist()) if len(uncached) else {}
        return [
            KVBlockInfo(
                block_id=block,
                tier=Tier.GPU if on_device else Tier.CPU,
                state=self._state(block, refs),
                size_bytes=self.block_bytes,
                ref_count=refs,
                last_access=access,
                tenant_id=(self.tenant_of if self._cache.is_cached[block] else held).get(block, ""),
            )
            for block, refs, access, on_device in zip(
                ids.tolist(),
                memory.ref_count[ids].tolist(),
                memory.access_time[ids].tolist(),
                self._cache.on_device(ids).tolist(),
                strict=True,
            )
        ]

    def on_device(self, ids: BlockIds) -> np.ndarray:
        """bool [n]: whether each block lies in the pool."""
        return self._cache.on_device(ids)

    def prefix_candidates(self, tokens: np.ndarray, namespace: str) -> list[PrefixCandidate]:
        """Matches of the tokens on the pool alone and on all tiers, longest first."""
        hits = self._cache.index.lookup_tiers(tokens, namespace) if self._cache.enabled else []
        return [PrefixCandidate(tuple(hit.kv_block_ids.tolist()), tuple(TIERS[place] for place in hit.tiers)) for hit in hits]

    def note_tenant(self, block_ids: Sequence[int], tenant: str) -> None:
        """Remember whose request computed these blocks, which are cached from now on."""
        if tenant:
            self.tenant_of.update(dict.fromkeys(block_ids, tenant))
        elif self.tenant_of:
            for block in block_ids:
                self.tenant_of.pop(block, None)

    def _state(self, block: int, refs: int) -> BlockState:
        if refs == 0:
            return BlockState.FREE
        return BlockState.CACHED if refs == 1 and self._cache.is_cached[block] else BlockState.ACTIVE

    # ---- eviction

    def evict(self, num_blocks: int) -> int:
        """Free at least `num_blocks` of the pool if the prefix cache holds them; returns how many became free."""
        if not (self._host.plugins or self._host_slots or self._host.recorder.enabled):
            num_evicted = self._cache.drop_lru(max(num_blocks, 0))  # no listener wants to know which
            self.evicted[EvictionReason.PREFIX] += num_evicted
            return num_evicted
        before = self.num_free()
        if self._host.decides("select_victims"):
            self._evict_chosen(num_blocks)
        # A plug-in may also have made room by migrating, or chosen too few.
        missing = num_blocks - (self.num_free() - before)
        if missing > 0:
            candidates = self._num_unlocked()
            victims = self._cache.evict_lru(missing)
            self.give_up(victims, BUILT_IN, "least recently used", requested=missing, candidates=candidates)
        return self.num_free() - before

    def _evict_chosen(self, num_blocks: int) -> None:
        if not self._cache.has_candidates():
            return
        request, num_unlocked = VictimRequest.lazy(num_blocks, self._cache.candidates), self._num_unlocked()
        decided = self._host.decide("select_victims", request, self._check_choice)
        request.close()
        if decided is None or not decided[1].victims:
            return
        name, decision = decided
        victims = np.array(decision.victims, np.int64)
        is_pool = self._cache.on_device(victims)
        # Those of the pool first: what hangs below them on the host goes with them.
        for tier, some in ((Tier.GPU, victims[is_pool]), (Tier.CPU, victims[~is_pool])):
            if not self._evict_of(tier, some, decision, name, requested=num_blocks, candidates=num_unlocked):
                return

    def _check_choice(self, answer: Any) -> EvictionDecision:
        """All but whether a child of a victim would be left behind, which the index tells when it is to forget them."""
        decision = check_choice(answer, self.num_blocks)
        inside = [block if 0 <= block < self.num_blocks else -1 for block in decision.victims]
        is_candidate = self._cache.are_candidates(np.array(inside, np.int64))
        if foreign := [block for block, known in zip(decision.victims, is_candidate, strict=True) if not known]:
            raise foreign_victims(foreign)
        return decision

    def _evict_of(
        self, tier: Tier, victims: BlockIds, decision: EvictionDecision, name: str, **counts: int | None
    ) -> bool:
        """Evict chosen blocks of one tier; False if the plug-in is switched off for a child that it left behind."""
        chosen = set(decision.victims)
        try:
            gone = self._cache.evict(victims, tier)
        except PrefixIndexError as error:  # nothing was changed
            self._host.blame("select_victims", orphaned(chosen, self._cache.candidates()) or str(error))
            return False
        reason_of = dict(zip(decision.victims, decision.reasons, strict=True)) if decision.reasons else {}
        reasons = [reason_of.get(block, ABOVE_WENT) for block in gone.tolist()] if reason_of else None
        left_behind = sorted(set(gone.tolist()) - chosen)
        self.give_up(gone, name, decision.reason, reasons=reasons, **counts)
        if left_behind:
            detail = f"a victim still has the cached children {left_behind} on another tier; choose all (see leaf_first)"
            self._host.blame("select_victims", detail)
        return not left_behind

    def give_up(
        self, victims: BlockIds, policy: str, reason: str, *, reasons: Sequence[str] | None = None, asked_by: str | None = None,
        **counts: int | None,
    ) -> None:  # fmt: skip
        """The prefix cache lets go of blocks that the index does not know any more. `reasons`: one for each, or None.
        `asked_by`: the plug-in in the middle of whose hook this happens."""
        if len(victims) == 0:
            return
        if self._host.recorder.enabled:
            each = {} if reasons is None else {"reasons": list(reasons)}
            self._host.recorder.write("evict", policy=policy, reason=reason, **counts, victims=victims.tolist(), **each)
        self.tell_evicted(victims, EvictionReason.PREFIX, asked_by=asked_by)
        if self._outs or self._ins:
            self._forget_copies(victims)
        self._cache.freed(victims)

    def drop(self, block_ids: Sequence[int], reasons: Sequence[str], policy: str) -> tuple[int, ...]:
        """Drop blocks that a plug-in gives up, see the contract. O(blocks named), if none of them must be passed over."""
        if not self._cache.enabled:
            return ()
        reason_of = dict(zip(block_ids, reasons, strict=True)) if reasons else {}
        ids = np.array(list(dict.fromkeys(block_ids)), np.int64)
        ids = ids[self._cache.are_candidates(ids)]
        is_pool, dropped = self._cache.on_device(ids), []
        # Those of the pool first, as in an eviction.
        for tier, some in ((Tier.GPU, ids[is_pool]), (Tier.CPU, ids[~is_pool])):
            try:
                gone = self._cache.evict(some, tier)
            except PrefixIndexError:  # nothing was changed
                gone = self._cache.evict(self._without_continued(some, tier), tier)
            each = [reason_of.get(block, ABOVE_WENT) for block in gone.tolist()] if reason_of else None
            self.give_up(gone, policy, "dropped by the plug-in", reasons=each, asked_by=policy)
            dropped += gone.tolist()
        return tuple(dropped)

    def _without_continued(self, ids: BlockIds, tier: Tier) -> BlockIds:
        """Those of the blocks of a tier below which no block of that tier is left behind. O(all candidates)."""
        rows, chosen = self._cache.candidates(), set(ids.tolist())
        parent_of = dict(zip(rows.block_ids.tolist(), rows.parent_ids.tolist(), strict=True))
        above: set[int] = set()  # blocks that stay, as one below them does, maybe with others of another tier between
        for block in rows.block_ids[rows.on_device == (tier is Tier.GPU)].tolist():
            while block not in chosen and (block := parent_of.get(block, -1)) >= 0 and block not in above:
                above.add(block)
                chosen.discard(block)
        return np.array([block for block in ids.tolist() if block in chosen], np.int64)

    def _num_unlocked(self) -> int | None:
        """Write to the record, if one is kept."""
        return int(np.count_nonzero(self._cache.unlocked())) if self._host.recorder.enabled else None

    def lose_cache(self) -> None:
        """The index has failed: the engine goes on without one. Blocks of requests stay."""
        self._cache.disable()
        self.give_up(np.flatnonzero(self._cache.is_cached), BUILT_IN, "the prefix index failed")

    def tell_evicted(
        self, block_ids: Sequence[int] | BlockIds, reason: EvictionReason, request_id: int | None = None, *,
        asked_by: str | None = None,
    ) -> None:  # fmt: skip
        """`asked_by`: a plug-in that waits, knows already, and could be waited for by those who are told: they hear later."""
        self.evicted[reason] += len(block_ids)
        if self._callbacks or self._host.listens("on_evicted"):
            notice = EvictionNotice(tuple(int(block) for block in block_ids), reason, request_id)
            if asked_by is not None:
                self._host.post("on_evicted", notice, but=asked_by)
                for name, callback in self._callbacks:
                    if name != asked_by:
                        self._host.guards[name].post("eviction_callback", callback, notice)
                return
            self._host.notify("on_evicted", notice)
            for name, callback in self._callbacks:
                self._host.call_one(name, "eviction_callback", callback, notice)

    def add_callback(self, name: str, callback: Callable[[EvictionNotice], None]) -> None:
        self._callbacks.append((name, callback))

    # ---- migration

    def migrate(self, plan: MigrationPlan, policy: str = BUILT_IN) -> MigrationResult:
        """Raises PluginError for a pair of tiers that this engine does not have."""
        moves = {(Tier.GPU, Tier.CPU): self._offload, (Tier.CPU, Tier.GPU): self._restore}
        pair = (plan.src_tier, plan.dst_tier)
        if pair not in moves:
            raise PluginError(f"cannot migrate {pair[0].value} -> {pair[1].value}; allowed: gpu -> cpu, cpu -> gpu.")
        start_s = time.perf_counter()
        moved, refused = [], {}
        for block in map(int, plan.block_ids):
            why = self._why_not(block) or moves[pair](block)
            if why:
                refused[block] = why
            else:
                moved.append(block)
        self.pool.latencies["migrate"].since(start_s)
        self.migrated[pair[1]] += len(moved)
        self._host.recorder.write(
            "migrate", policy=policy, src=pair[0].value, dst=pair[1].value, moved=moved, refused=refused
        )
        return MigrationResult(tuple(moved), refused)

    def _why_not(self, block: int) -> str:
        if not self._cache.holds(block):
            return "not a cached block"
        num_holders = self._allocator.get_ref_count(np.array([block]))[0]
        if num_holders == 2 and self.ending is not None:  # the cache, and perhaps the request that is about to give it back
            num_holders -= any(block in seq.logical_blocks.get_real_blocks() for seq in self.ending.sequences.values())
        return "" if num_holders == 1 else "in use by a request"

    def _offload(self, block: int) -> str:
        slot = self._slot(block)
        host = self._allocator.get_phy_allocator("cpu")
        if slot >= self._pool_slots:
            return "already on the host"
        if slot in self._ins.values():
            return "restored since the last forward pass"
        if host.get_num_free_blocks() == 0:
            return "the host tier is full" if self._host_slots else "there is no host tier (host_kv_blocks is 0)"
        self._cache.move(block, Tier.GPU, Tier.CPU)
        target = int(host.allocate(1)[0])
        self._pool.free(np.array([slot]))
        self._outs[slot] = target - self._pool_slots
        self._allocator.update_phy_map(np.array([block]), np.array([target]))
        return ""

    def _restore(self, block: int) -> str:
        slot = self._slot(block)
        if slot < self._pool_slots:
            return "not on the host"
        if self.num_free() == 0:
            return "the pool is full"
        self._cache.move(block, Tier.CPU, Tier.GPU)
        target = int(self._pool.allocate(1)[0])
        self._ins[slot - self._pool_slots] = target
        self._allocator.update_phy_map(np.array([block]), np.array([target]))
        return ""

    def bring_back(self, block_ids: BlockIds) -> int:
        """Restore blocks that a request has just matched; returns how many of the first ones are on the device now."""
        num_away = np.count_nonzero(~self._cache.on_device(block_ids))
        room = self.num_free()
        if num_away > room:
            self.evict(int(num_away) - room)
        num_kept, moved = len(block_ids), []
        for position, block in enumerate(block_ids.tolist()):
            if self._slot(block) >= self._pool_slots:
                if self._restore(block):
                    num_kept = position
                    break
                moved.append(block)
        self.migrated[Tier.GPU] += len(moved)
        self._host.recorder.write("migrate", policy=BUILT_IN, src="cpu", dst="gpu", moved=moved, refused={})
        return num_kept

    def take_swaps(self) -> tuple[int, dict[int, int], dict[int, int]]:
        """(number, ins, outs) of the pass that is sent now; the maps in the form LMDeploy's cache engine takes."""
        self._num_sent += 1
        if not (self._ins or self._outs):
            return self._num_sent, {}, {}
        ins, self._ins = self._ins, {}
        outs, self._outs = self._outs, {}
        self.host_blocks.sent(self._num_sent, ins, outs)
        if ins:
            slots = np.fromiter(ins, np.int64, len(ins)) + self._pool_slots
            self._allocator.get_phy_allocator("cpu").free(slots)
        return self._num_sent, ins, outs

    def host_bytes(self, block_ids: Sequence[int]) -> list[BlockBytes]:
        """Raises PluginError, see the contract."""
        return self.host_blocks.bytes_of(block_ids, {host: pool for pool, host in self._outs.items()})

    def adopt(self, block_ids: Sequence[int], tokens: np.ndarray, namespace: str, policy: str) -> tuple[int, ...]:
        """Raises PluginError, see the contract."""
        taken = self.host_blocks.adopt(block_ids, tokens, namespace, policy)
        self._host.recorder.write(
            "adopt",
            policy=policy,
            blocks=taken,
            freed=len(block_ids) - len(taken),
            tokens=len(tokens),
            namespace=namespace,
        )
        return taken

    def _slot(self, block: int) -> int:
        return int(self._allocator.get_physical_blocks(np.array([block]))[0])

    def _forget_copies(self, ids: np.ndarray) -> None:
        """Drop copies towards slots that are about to be free for others: those of blocks that only the cache holds."""
        ids = ids[self._allocator.get_ref_count(ids) == 1]
        slots = set(self._allocator.get_physical_blocks(ids).tolist())
        self._outs = {src: dst for src, dst in self._outs.items() if dst + self._pool_slots not in slots}
        gone = [src for src, dst in self._ins.items() if dst in slots]
        for src in gone:
            del self._ins[src]
        if gone:
            # Out and back since the last pass: the way out must not write into a slot that gets a new owner either.
            self._outs = {src: dst for src, dst in self._outs.items() if dst not in gone}
            self._allocator.get_phy_allocator("cpu").free(np.array(gone, np.int64) + self._pool_slots)
