"""Recounts an engine's blocks from LMDeploy's own numbers, independently of what the hooks keep."""

import asyncio
from collections import Counter
from typing import Any

import numpy as np

from sagellm.core.hooks import Tier

SETTLE_S = 30.0


def settle(engine: Any) -> None:
    """Wait until the engine has ended every session: the end of a request is a message without an answer."""

    async def wait() -> None:
        while engine.engine.scheduler.sessions:
            await asyncio.sleep(0.001)

    engine._on_loop(asyncio.wait_for(wait(), SETTLE_S))


def cached_blocks(engine: Any) -> set[int]:
    return set(engine.hooks.cache.index.blocks().kv_block_ids.tolist())


def check_pool(engine: Any) -> None:
    """An idle engine: no block is active or lost, none has two owners, and the hooks' counts are the engine's."""
    from sagellm.engines.lmdeploy.scheduler import PREFIX_INDEX

    scheduler = engine.engine.scheduler
    assert PREFIX_INDEX not in {fault.plugin for fault in engine.hooks._host.faults}
    check_blocks(scheduler)
    assert not scheduler.sessions
    assert engine.hooks.kv.counts().active == 0


def check_blocks(scheduler: Any) -> None:
    """Index, requests and allocator agree on every block, at any moment between two calls of the scheduler."""
    hooks = scheduler.sage
    sequences = [seq for session in scheduler.sessions.values() for seq in session.sequences.values()]
    assert not scheduler.block_trie.leaves and not scheduler.block_trie._roots, "LMDeploy's trie was used"
    memory = scheduler.block_manager.allocator._log_mem
    tables = {seq.seq_id: seq.logical_blocks.get_real_blocks().tolist() for seq in sequences}
    held = {seq.seq_id: hooks.cache.num_held(seq) for seq in sequences}
    tier_of = _check_index(hooks, Counter(b for number, table in tables.items() for b in table[: held[number]]), memory)

    references = Counter([*tier_of, *hooks.kv.host_blocks.reserved, *hooks.kv.pool.reserved])
    for table in tables.values():
        assert len(set(table)) == len(table)
        references.update(table)
    assert memory.ref_count.tolist() == [references[block] for block in range(memory.num_blocks())]
    for seq in sequences:
        due = hooks.branches._due.get(seq.seq_id)  # of these tokens the last ones come with a copy, once it runs
        assert seq.num_blocks * seq.block_size >= seq.num_history_ids or seq.num_history_ids == due
        assert all(block in tier_of for block in tables[seq.seq_id][: held[seq.seq_id]])
    _check_slots(scheduler, sorted(references), memory)


def _check_index(hooks: Any, locks: Counter, memory: Any) -> dict[int, Tier]:
    """{cached block: tier}; `locks` counts the requests that hold each block."""
    from sagellm.prefix_reuse import TIERS

    cache = hooks.cache
    if not cache.enabled:
        assert not cache.is_cached.any()
        return {}
    rows = cache.index.blocks()
    ids = rows.kv_block_ids.tolist()
    assert len(set(ids)) == len(ids), "a block is cached twice"
    assert np.flatnonzero(cache.is_cached).tolist() == sorted(ids)
    assert dict(zip(ids, rows.num_locks.tolist(), strict=True)) == {block: locks[block] for block in ids}
    assert len(cache._held) == cache.index.metrics()["locks"], "a lock was not given back"
    tier_of = dict(zip(ids, (TIERS[place] for place in rows.tiers), strict=True))
    assert all((memory.phy_map[block] < hooks.kv._pool_slots) == (tier is Tier.GPU) for block, tier in tier_of.items())
    return tier_of


def _check_slots(scheduler: Any, used: list[int], memory: Any) -> None:
    """`used`: the ids that somebody holds."""
    allocator, hooks = scheduler.block_manager.allocator, scheduler.sage
    slots = memory.phy_map[used].tolist() if used else []
    assert len(set(slots)) == len(slots), "two blocks share a slot"
    pool, host = allocator.get_phy_allocator("gpu"), allocator.get_phy_allocator("cpu")
    pending = [src + pool._num_blocks for src in hooks.kv._ins]
    in_pool = [slot for slot in slots if slot < pool._num_blocks]
    _check_partition(pool, in_pool)
    _check_partition(host, [slot for slot in slots if slot >= pool._num_blocks] + pending)
    assert sorted(_free_ids(allocator, allocator._num_blocks) + used) == list(range(memory.num_blocks()))

    counts = hooks.kv.counts()
    assert counts.free + counts.cached + counts.active == counts.total
    assert counts.free == pool.get_num_free_blocks() == counts.total - len(in_pool)
    assert counts.host_used == len(slots) - len(in_pool) + len(pending)


def _free_ids(allocator: Any, size: int) -> list[int]:
    return allocator._free_blocks[size - allocator._free_count :].tolist()


def _check_partition(allocator: Any, used: list[int]) -> None:
    everything = range(allocator._offset, allocator._offset + allocator._num_blocks)
    assert sorted(_free_ids(allocator, allocator._num_blocks) + used) == list(everything)
