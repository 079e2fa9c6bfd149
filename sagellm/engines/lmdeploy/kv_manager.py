"""LMDeploy's block pool as the contract sees it: information, victims, and migration to a host tier and back.

Three notions of a block: its id (LMDeploy's logical block, which requests and the prefix trie hold), the slot of the pool
that holds its bytes, and the slot of the host cache that does so after an offload. Migration changes the slot, not the id.

Copies are not made here. They ride with the inputs of the next forward pass, which executes them, outs before ins, before
it reads or writes any block. Two rules keep that order harmless: a block restored since the last pass is not offloaded
again, and a host slot freed by a restore is not handed out before that pass was sent.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np

from sagellm.core.errors import PluginError
from sagellm.core.hooks import (
    BlockCounts,
    BlockState,
    EvictionDecision,
    EvictionNotice,
    EvictionReason,
    KVBlockInfo,
    MigrationPlan,
    MigrationResult,
    Tier,
    VictimRequest,
)
from sagellm.core.host import Nonsense, PluginHost

BUILT_IN = "lru"


class KVManager:
    """Owned by one scheduler; called on the engine's thread, or on a plug-in's while the engine waits for it."""

    def __init__(self, scheduler: Any, host: PluginHost, block_bytes: int) -> None:
        self._host = host
        self._allocator = scheduler.block_manager.allocator
        self._pool = self._allocator.get_phy_allocator("gpu")
        self._pool_slots = scheduler.block_manager.num_gpu_blocks
        self._host_slots = scheduler.block_manager.num_cpu_blocks
        self._trie = scheduler.block_trie
        self.block_size = scheduler.cache_config.block_size
        self.block_bytes = block_bytes
        self.nodes: dict[int, Any] = {}  # block id -> node of LMDeploy's trie
        self.num_blocks = self._allocator._log_mem.num_blocks()  # of the pool and the host tier together
        self._has_node = np.zeros(self.num_blocks, bool)  # the keys of `nodes`
        self._clock = count(1)
        self._outs: dict[int, int] = {}  # pool slot -> host slot, to be copied with the next pass
        self._ins: dict[int, int] = {}  # host slot -> pool slot
        self._callbacks: list[tuple[str, Callable[[EvictionNotice], None]]] = []
        self.evicted = {reason: 0 for reason in EvictionReason}
        self.migrated = {Tier.CPU: 0, Tier.GPU: 0}

    def tick(self) -> int:
        """The next access time. LMDeploy's own counts whole seconds, so that all blocks of a second look alike."""
        return next(self._clock)

    # ---- information

    def add_node(self, node: Any) -> None:
        """The prefix cache holds this node's block from now on."""
        self.nodes[int(node.block)] = node
        self._has_node[node.block] = True

    def num_free(self) -> int:
        return self._pool.get_num_free_blocks()

    def counts(self) -> BlockCounts:
        memory = self._allocator._log_mem
        is_cached = self._has_node & (memory.ref_count == 1)
        if self._host_slots:
            is_cached &= memory.phy_map < self._pool_slots
        cached = int(np.count_nonzero(is_cached))
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
        return [
            KVBlockInfo(
                block_id=block,
                tier=Tier.GPU if on_device else Tier.CPU,
                state=self._state(block, refs),
                size_bytes=self.block_bytes,
                ref_count=refs,
                last_access=access,
            )
            for block, refs, access, on_device in zip(
                ids.tolist(),
                memory.ref_count[ids].tolist(),
                memory.access_time[ids].tolist(),
                self._on_device(ids).tolist(),
                strict=True,
            )
        ]

    def _state(self, block: int, refs: int) -> BlockState:
        if refs == 0:
            return BlockState.FREE
        return BlockState.CACHED if refs == 1 and block in self.nodes else BlockState.ACTIVE

    def _on_device(self, ids: np.ndarray) -> np.ndarray:
        return self._allocator.get_physical_blocks(ids) < self._pool_slots

    def is_offloaded(self, ids: Sequence[int]) -> np.ndarray:
        return ~self._on_device(np.asarray(ids, dtype=np.int64))

    # ---- eviction

    def evict(self, num_blocks: int) -> int:
        """Free at least `num_blocks` of the pool if the prefix cache holds them; returns how many became free."""
        before = self.num_free()
        request = self._victim_request(num_blocks)
        if len(request.block_ids) == 0:
            return 0
        decided = self._host.decide("select_victims", request, lambda answer: _check_victims(answer, request))
        if decided is not None:
            name, decision = decided
            self._drop(decision.victims, name, decision.reason, request)
        # A plug-in may also have made room by migrating, or chosen too few.
        missing = num_blocks - (self.num_free() - before)
        if missing > 0:
            request = self._victim_request(missing)
            self._drop(request.leaf_first(), BUILT_IN, "least recently used", request)
        return self.num_free() - before

    def _victim_request(self, num_blocks: int) -> VictimRequest:
        ids = np.fromiter(self.nodes, np.int64, len(self.nodes))
        # A request that holds a block holds all its ancestors, so below an unreferenced block nothing is referenced.
        ids = ids[self._allocator.get_ref_count(ids) == 1] if ids.size else ids
        nodes = [self.nodes[block] for block in ids.tolist()]
        parents = np.array([node.parent.block for node in nodes], np.int64)
        arrays = (
            ids,
            np.where(np.isin(parents, ids), parents, -1),
            self._allocator.get_access_time(ids),
            np.array([node.num_matched for node in nodes], np.int64),
            self._on_device(ids),
        )
        for array in arrays:
            array.flags.writeable = False
        return VictimRequest(num_blocks, *arrays)

    def _drop(self, victims: Iterable[int], policy: str, reason: str, request: VictimRequest) -> None:
        victims = list(victims)
        if not victims:
            return
        self._host.recorder.write(
            "evict", policy=policy, reason=reason, requested=request.count, candidates=len(request.block_ids),
            victims=victims,
        )  # fmt: skip
        self.tell_evicted(victims, EvictionReason.PREFIX)
        # Deepest first, so that a node is a leaf when its turn comes.
        for block in sorted(victims, key=lambda block: -self.nodes[block].num_matched):
            node = self.nodes.pop(block)
            self._has_node[block] = False
            parent = node.parent
            node.parent = None
            self._trie.leaves.discard(node)
            if parent.parent is not None and not parent.children:
                self._trie.leaves.add(parent)
        ids = np.array(victims, np.int64)
        self._forget_copies(ids)
        self._allocator.free(ids)

    def tell_evicted(self, block_ids: Sequence[int], reason: EvictionReason, request_id: int | None = None) -> None:
        self.evicted[reason] += len(block_ids)
        if self._callbacks or self._host.listens("on_evicted"):
            notice = EvictionNotice(tuple(int(block) for block in block_ids), reason, request_id)
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
        moved, refused = [], {}
        for block in map(int, plan.block_ids):
            why = self._why_not(block) or moves[pair](block)
            if why:
                refused[block] = why
            else:
                moved.append(block)
        self.migrated[pair[1]] += len(moved)
        self._host.recorder.write(
            "migrate", policy=policy, src=pair[0].value, dst=pair[1].value, moved=moved, refused=refused
        )
        return MigrationResult(tuple(moved), refused)

    def _why_not(self, block: int) -> str:
        if block not in self.nodes:
            return "not a cached block"
        return "" if self._allocator.get_ref_count(np.array([block]))[0] == 1 else "in use by a request"

    def _offload(self, block: int) -> str:
        slot = self._slot(block)
        host = self._allocator.get_phy_allocator("cpu")
        if slot >= self._pool_slots:
            return "already on the host"
        if slot in self._ins.values():
            return "restored since the last forward pass"
        if host.get_num_free_blocks() == 0:
            return "the host tier is full" if self._host_slots else "there is no host tier (host_kv_blocks is 0)"
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
        target = int(self._pool.allocate(1)[0])
        self._ins[slot - self._pool_slots] = target
        self._allocator.update_phy_map(np.array([block]), np.array([target]))
        return ""

    def bring_back(self, block_ids: Sequence[int]) -> int:
        """Restore blocks that a request has just matched; returns how many of the first ones are on the device now."""
        away = [block for block, is_away in zip(block_ids, self.is_offloaded(block_ids), strict=True) if is_away]
        room = self.num_free()
        if len(away) > room:
            self.evict(len(away) - room)
        for position, block in enumerate(block_ids):
            if self._slot(block) >= self._pool_slots:
                if self._restore(block):
                    return position
                self.migrated[Tier.GPU] += 1
        return len(block_ids)

    def take_swaps(self) -> tuple[dict[int, int], dict[int, int]]:
        """(ins, outs) for the pass that is sent now, in the form LMDeploy's cache engine takes."""
        ins, self._ins = self._ins, {}
        outs, self._outs = self._outs, {}
        if ins:
            slots = np.fromiter(ins, np.int64, len(ins)) + self._pool_slots
            self._allocator.get_phy_allocator("cpu").free(slots)
        return ins, outs

    def _slot(self, block: int) -> int:
        return int(self._allocator.get_physical_blocks(np.array([block]))[0])

    def _forget_copies(self, ids: np.ndarray) -> None:
        """Drop copies towards slots that are about to be free for others."""
        if not (self._outs or self._ins):
            return
        slots = set(self._allocator.get_physical_blocks(ids).tolist())
        self._outs = {src: dst for src, dst in self._outs.items() if dst + self._pool_slots not in slots}
        gone = [src for src, dst in self._ins.items() if dst in slots]
        for src in gone:
            del self._ins[src]
        if gone:
            # Out and back since the last pass: the way out must not write into a slot that gets a new owner either.
            self._outs = {src: dst for src, dst in self._outs.items() if dst not in gone}
            self._allocator.get_phy_allocator("cpu").free(np.array(gone, np.int64) + self._pool_slots)


def _check_victims(answer: Any, request: VictimRequest) -> EvictionDecision:
    decision = answer if isinstance(answer, EvictionDecision) else EvictionDecision(answer)
    if len(decision.victims) > len(request.block_ids):
        raise Nonsense(f"{len(decision.victims)} victims; there are {len(request.block_ids)} candidates")
    victims = [int(block) for block in decision.victims]
    chosen = set(victims)
    if len(chosen) != len(victims):
        raise Nonsense(f"victims {victims} name a block twice")
    parent_of = dict(zip(request.block_ids.tolist(), request.parent_ids.tolist(), strict=True))
    foreign = chosen - parent_of.keys()
    if foreign:
        raise Nonsense(f"victims {sorted(foreign)} are unknown or active; choose among the candidates")
    for block, parent in parent_of.items():
        if parent in chosen and block not in chosen:
            raise Nonsense(f"victim {parent} still has the cached child {block}; choose both (see leaf_first)")
    return EvictionDecision(victims, str(decision.reason))
