"""Blocks of the host tier whose bytes a plug-in reads, or brings.

Copies between the pool and the host tier ride with a forward pass, which makes them on a thread or a stream of its own. So
from the moment a pass is sent until it has ended nothing else may touch the slots that it copies from or to; they are *busy*.

A block whose copy to the host was ordered and not sent yet still has its bytes in the pool. Its slot there may belong to
another block by now, but passes run in order, so it is not written before the pass that makes the copy. Passes that run
already write to slots
of blocks that are not full, which no cached block has, and to those that they bring back, which are busy.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sagellm.core.errors import PluginError
from sagellm.core.hooks import Tier
from sagellm.engines.lmdeploy.host_memory import BlockBytes, SlotMemory
from sagellm.engines.lmdeploy.prefix_cache import PrefixCache


class HostBlocks:
    """Owned by the `KVManager`, and called where that is. `open_memory` is called once, when bytes are first asked for.

    A reserved block is an id and a slot of its own, with one reference, which becomes the index's.
    """

    def __init__(
        self, scheduler: Any, cache: PrefixCache, block_bytes: int, open_memory: Callable[[], SlotMemory]
    ) -> None:  # fmt: skip
        self._allocator = scheduler.block_manager.allocator
        self._pool_slots = scheduler.block_manager.num_gpu_blocks
        self._cache = cache
        self._block_bytes = block_bytes
        self._open_memory = open_memory
        self._memory: SlotMemory | None = None
        self._busy: dict[int, int] = {}  # host slot -> the last pass that copies from or to it
        self._filled: dict[int, int] = {}  # slot of the pool -> the last pass that brings a block back there
        self._reserved: dict[int, tuple[str, BlockBytes]] = {}  # id -> who, the bytes to be

    # ---- passes

    def sent(self, number: int, ins: dict[int, int], outs: dict[int, int]) -> None:
        """A forward pass was sent that makes these copies, from slot to slot. Numbers rise."""
        self._busy.update(dict.fromkeys([*ins, *outs.values()], number))
        self._filled.update(dict.fromkeys(ins.values(), number))

    def ended(self, number: int) -> None:
        """This pass, and so every one before it, has made its copies."""
        if self._busy:
            self._busy = {slot: last for slot, last in self._busy.items() if last > number}
            self._filled = {slot: last for slot, last in self._filled.items() if last > number}

    # ---- out

    def bytes_of(self, block_ids: Sequence[int], awaited: dict[int, int]) -> list[BlockBytes]:
        """`awaited`: host slots to which copies were ordered that are not on their way yet, and from which slots of the pool.
        Raises PluginError, see the contract."""
        slots = [self._slot(block) for block in block_ids]
        return [self._read(block, slot, awaited.get(slot)) for block, slot in zip(block_ids, slots, strict=True)]

    def _read(self, block: int, slot: int, source: int | None) -> BlockBytes:
        found = None
        if source is None and slot not in self._busy:
            found = self._opened().read(slot)
        elif source is not None and source not in self._filled:
            found = self._opened().read_pool(source)
        if found is None:
            raise PluginError(f"block {block}: a copy of it is still on its way; ask again in a later step.")
        return found

    def _slot(self, block: int) -> int:
        if not self._cache.holds(block):
            raise PluginError(f"block {block} is not cached.")
        slot = int(self._allocator.get_physical_blocks(np.array([block]))[0]) - self._pool_slots
        if slot < 0:
            raise PluginError(f"block {block} is not on the host tier.")
        return slot

    # ---- in

    @property
    def reserved(self) -> list[int]:
        return list(self._reserved)

    def reserve(self, count: int, owner: str) -> tuple[list[int], list[BlockBytes]]:
        """Free blocks whose slots no copy touches."""
        self._opened()
        free = self._allocator.get_phy_allocator("cpu").get_num_free_blocks()
        ids = self._allocator.allocate(min(max(count, 0) + len(self._busy), free), "cpu")
        slots = self._allocator.get_physical_blocks(ids) - self._pool_slots
        settled = [block for block, slot in zip(ids.tolist(), slots.tolist(), strict=True) if slot not in self._busy]
        kept = settled[: max(count, 0)]
        self._allocator.free(ids[~np.isin(ids, kept)])
        buffers = [np.empty(self._block_bytes, np.uint8) for _ in kept]
        self._reserved.update({block: (owner, buffer) for block, buffer in zip(kept, buffers, strict=True)})
        return kept, buffers

    def adopt(self, block_ids: Sequence[int], tokens: np.ndarray, namespace: str, owner: str) -> tuple[int, ...]:
        """Raises PluginError, see the contract."""
        self._check_owned(block_ids, owner)
        num_blocks, rest = divmod(len(tokens), self._cache.block_size)
        if rest or num_blocks < len(block_ids):
            raise PluginError(
                f"{len(block_ids)} blocks of {self._cache.block_size} tokens cannot be the last ones of {len(tokens)} tokens."
            )
        first = num_blocks - len(block_ids)
        taken = self._insert(block_ids, first, tokens, namespace) if self._cache.enabled else []
        for block in taken:
            del self._reserved[block]
        self._free([block for block in block_ids if block not in taken])
        return tuple(taken)

    def _insert(self, block_ids: Sequence[int], first: int, tokens: np.ndarray, namespace: str) -> list[int]:
        """Those of the blocks, number `first` and following of the tokens, that the index knows afterwards."""
        index = self._cache.index
        hit = index.lookup(tokens, namespace, touch=False, lock=True)
        try:
            num_cached = len(hit.kv_block_ids)
            if num_cached < first:  # without its beginning a block can never be found
                return []
            taken = list(block_ids[num_cached - first :])
            if taken:
                self._fill(taken)
                new_tokens = tokens[num_cached * self._cache.block_size :]
                index.extend(hit.lock, new_tokens, np.array(taken, np.int32), tier=Tier.CPU)
                self._cache.is_cached[taken] = True
            return taken
        finally:
            index.unlock(hit.lock)

    def _fill(self, block_ids: Sequence[int]) -> None:
        memory = self._opened()
        slots = self._allocator.get_physical_blocks(np.array(block_ids)) - self._pool_slots
        for block, slot in zip(block_ids, slots.tolist(), strict=True):
            memory.write(slot, self._reserved[block][1])

    def free(self, block_ids: Sequence[int], owner: str) -> None:
        self._check_owned(block_ids, owner)
        self._free(block_ids)

    def free_all_of(self, owner: str) -> None:
        """Give back the reservations of a plug-in that is switched off."""
        self._free([block for block, (name, _) in self._reserved.items() if name == owner])

    def owners(self) -> set[str]:
        return {owner for owner, _ in self._reserved.values()}

    def _free(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            del self._reserved[block]
        if len(block_ids):
            self._allocator.free(np.array(block_ids, np.int64))

    def _check_owned(self, block_ids: Sequence[int], owner: str) -> None:
        foreign = [block for block in block_ids if block not in self._reserved or self._reserved[block][0] != owner]
        if foreign or len(set(block_ids)) != len(block_ids):
            raise PluginError(
                f"blocks {foreign or list(block_ids)}: name blocks that reserve_host gave you, each once."
            )

    def _opened(self) -> SlotMemory:
        if self._memory is None:
            self._memory = self._open_memory()
        return self._memory
