"""Recounts an engine's blocks from LMDeploy's own numbers, independently of what the hooks keep."""

import asyncio
from typing import Any

import numpy as np

SETTLE_S = 10.0


def settle(engine: Any) -> None:
    """Wait until the engine has ended every session: the end of a request is a message that nobody answers."""

    async def wait() -> None:
        while engine.engine.scheduler.sessions:
            await asyncio.sleep(0.001)

    engine._on_loop(asyncio.wait_for(wait(), SETTLE_S))


def trie_nodes(engine: Any) -> list[Any]:
    """Every node of LMDeploy's prefix trie but the roots, parents before children."""
    nodes, queue = [], list(engine.engine.scheduler.block_trie._roots.values())
    while queue:
        node = queue.pop()
        queue.extend(node.children.values())
        if node.block >= 0:
            nodes.append(node)
    return nodes


def cached_blocks(engine: Any) -> set[int]:
    return {int(node.block) for node in trie_nodes(engine)}


def check_pool(engine: Any) -> None:
    """An idle engine: no block is active or lost, none has two owners, and the hooks' counts are the engine's."""
    scheduler = engine.engine.scheduler
    allocator = scheduler.block_manager.allocator
    memory = allocator._log_mem
    nodes = trie_nodes(engine)
    cached = [int(node.block) for node in nodes]
    assert len(set(cached)) == len(cached), "two trie nodes share a block"
    expected = np.zeros(memory.num_blocks(), np.int64)
    expected[cached] = 1
    assert memory.ref_count.tolist() == expected.tolist(), "an idle engine holds each cached block once, others never"
    # LMDeploy leaves a node among the leaves when a request walks over it and adds a child, so this is no equality; a
    # leaf that is missing would raise in its `allocate`.
    leaves = {id(leaf) for leaf in scheduler.block_trie.leaves}
    assert {id(node) for node in nodes if not node.children} <= leaves <= {id(node) for node in nodes}

    slots = memory.phy_map[cached].tolist() if cached else []
    assert len(set(slots)) == len(slots), "two blocks share a slot"
    pool = allocator.get_phy_allocator("gpu")
    host = allocator.get_phy_allocator("cpu")
    pending = [] if engine.hooks is None else [src + pool._num_blocks for src in engine.hooks.kv._ins]
    _check_partition(pool, [slot for slot in slots if slot < pool._num_blocks])
    _check_partition(host, [slot for slot in slots if slot >= pool._num_blocks] + pending)
    assert sorted(_free_ids(allocator, allocator._num_blocks) + cached) == list(range(memory.num_blocks()))

    if engine.hooks is None:
        return
    counts = engine.hooks.kv.counts()
    assert counts.free + counts.cached + counts.active == counts.total
    assert counts.active == 0
    assert counts.cached == sum(slot < pool._num_blocks for slot in slots)
    assert counts.free == pool.get_num_free_blocks()
    assert counts.host_used == sum(slot >= pool._num_blocks for slot in slots) + len(pending)
    assert set(engine.hooks.kv.nodes) == set(cached)


def _free_ids(allocator: Any, size: int) -> list[int]:
    return allocator._free_blocks[size - allocator._free_count :].tolist()


def _check_partition(allocator: Any, used: list[int]) -> None:
    everything = range(allocator._offset, allocator._offset + allocator._num_blocks)
    assert sorted(_free_ids(allocator, allocator._num_blocks) + used) == list(everything)
