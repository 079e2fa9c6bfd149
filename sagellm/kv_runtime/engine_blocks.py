"""The engine's blocks of gpu and cpu, by the keys under which the books know them."""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from sagellm.core.hooks import BlockId, BlockState, EngineHandle, Tier
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_runtime.hierarchy import HierarchyManager

__all__ = ["EngineBlocks"]

FOREIGN = 0xF0 << 56  # keys for blocks of the engine that no notice has named are looked for from here on


class EngineBlocks:
    """Which id stands for which key, one to one. A block that loses its id leaves the books of its tier.

    A block that no notice has named has a key of its own, which is `foreign`; it may stay behind when notices name it later.

    Args:
        engine: whose blocks these are.
        manager: of the books.
        counts: of the plug-in, by name.
        on_gone: is told the keys that have no id any more, once the books know.
    """

    def __init__(
        self, engine: EngineHandle, manager: HierarchyManager, counts: Counter[str],
        on_gone: Callable[[Sequence[BlockKey]], None],
    ) -> None:  # fmt: skip
        self.engine = engine
        self.manager = manager
        self.books = manager.books
        self.counts = counts
        self.key_of: dict[BlockId, BlockKey] = {}
        self.id_of: dict[BlockKey, BlockId] = {}
        self.foreign: set[BlockKey] = set()
        self._num_foreign = 0
        self._on_gone = on_gone

    def block(self, key: BlockKey, parent: BlockKey | None, depth: int, tenant_id: str, time_s: float) -> CachedBlock:
        """A full block of this engine, for the books."""
        engine = self.engine
        return CachedBlock(key, parent, depth, engine.block_size, engine.block_bytes, 0.0, tenant_id, time_s)

    def name(self, block_id: int, key: BlockKey) -> None:
        """The block of this key has this id; of both it was the only one."""
        before = self.id_of.pop(key, None)
        if before is not None:
            del self.key_of[before]
        self.id_of[key] = BlockId(block_id)
        self.key_of[BlockId(block_id)] = key

    def forget(self, block_id: int, *, evicted: bool = False) -> None:
        """The id stands for no block that the books know, or for another one. `evicted`: to make room."""
        key = self.key_of.pop(BlockId(block_id), None)
        if key is not None:
            del self.id_of[key]
            self.foreign.discard(key)
            tier = self.books.fast_tier(key)
            if tier is not None:
                self.manager.dropped(tier, [key], time.monotonic(), evicted=evicted)
            self._on_gone([key])

    def gone(self, tier: Tier, keys: Sequence[BlockKey], now_s: float) -> None:
        """These blocks of the tier have made room: they have no id any more, or will have none after this answer."""
        if not keys:
            return
        for key in keys:
            del self.key_of[self.id_of.pop(key)]
        self.foreign.difference_update(keys)
        self.manager.dropped(tier, keys, now_s)
        self._on_gone(keys)

    def is_taken(self, key: BlockKey, block_id: int) -> bool:
        """Whether the key stands for another block of the engine, which continues the same one: the keys collide."""
        other = self.id_of.get(key)
        if other is None or other == block_id:
            return False
        if self.engine.get_block_info([other])[0].state is BlockState.FREE:
            self.forget(other)
            return False
        self.counts["collisions"] += 1
        return True

    def foreign_key(self) -> BlockKey:
        """A new key for a block that no notice has named."""
        while True:
            self._num_foreign += 1
            key = BlockKey(FOREIGN + self._num_foreign)
            if key not in self.books:
                self.foreign.add(key)
                return key
