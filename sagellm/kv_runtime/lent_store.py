"""Blocks whose memory belongs to somebody else, as a `TierStore`: how an engine's host blocks take part in a move."""

import threading

import numpy as np

from sagellm.core.errors import TierError
from sagellm.core.hooks import Tier
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_runtime.base import BlockBytes, StoredBlock, StoreFullError

__all__ = ["LentStore"]


class LentStore:
    """Holds no memory of its own. `lend` shows a block to be read from here, `offer` gives room for one to be written here;
    `take_back` ends either.

    A `KVMigrator` may touch lent memory until it calls `on_done`, which can be later than the end of its future: take the
    memory back then.
    """

    def __init__(self, tier: Tier, capacity_bytes: int) -> None:
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._offered: dict[BlockKey, BlockBytes] = {}
        self._prepared: dict[BlockKey, tuple[StoredBlock, BlockBytes]] = {}
        self._committed: dict[BlockKey, tuple[StoredBlock, BlockBytes]] = {}

    def lend(self, block: CachedBlock, content: BlockBytes, digest: bytes = b"") -> None:
        """Show a block. `content`: uint8 [size_bytes], read only; it must not change until it is taken back."""
        if content.size != block.size_bytes:
            raise TierError(
                f"block {block.key} has {block.size_bytes} bytes, the memory lent {content.size}; lend as many."
            )
        with self._lock:
            self._refuse_known(block.key)
            self._committed[block.key] = StoredBlock(block, digest), content

    def offer(self, key: BlockKey, content: BlockBytes) -> None:
        """Room for one block that is to come. `content`: uint8 [bytes of a block], writable."""
        with self._lock:
            self._refuse_known(key)
            self._offered[key] = content

    def take_back(self, key: BlockKey) -> bool:
        """Forget the block, and the memory. Returns whether it was here whole: lent, or offered and written."""
        with self._lock:
            if key in self._prepared:
                raise TierError(f"block {key} is being written; take its memory back when its move has ended.")
            self._offered.pop(key, None)
            return self._committed.pop(key, None) is not None

    def prepare(self, block: CachedBlock, digest: bytes = b"") -> BlockBytes:
        with self._lock:
            if block.key in self._committed or block.key in self._prepared:
                raise TierError(f"block {block.key} is on tier {self.tier.value} already; take it back first.")
            content = self._offered.get(block.key)
            if content is None:
                raise StoreFullError(
                    f"no room was offered for block {block.key} on tier {self.tier.value}; offer some."
                )
            if content.size != block.size_bytes:
                raise TierError(f"block {block.key} has {block.size_bytes} bytes, the room offered {content.size}.")
            self._prepared[block.key] = StoredBlock(block, digest), content
            return content

    def commit(self, key: BlockKey) -> None:
        with self._lock:
            self._committed[key] = self._prepared.pop(key)
            self._offered.pop(key, None)

    def abort(self, key: BlockKey) -> None:
        with self._lock:
            self._prepared.pop(key)

    def read(self, key: BlockKey, into: BlockBytes | None = None, digest: bytes = b"") -> BlockBytes:
        with self._lock:
            stored, content = self._committed[key]
        if digest and digest != stored.digest:
            raise KeyError(key)
        if into is None:
            return content.copy()
        if into.shape != content.shape:
            raise TierError(
                f"block {key} has {content.size} bytes, the memory to read it into {into.size}; give as many."
            )
        np.copyto(into, content)
        return into

    def describe(self, key: BlockKey) -> StoredBlock:
        return self._committed[key][0]

    def remove(self, key: BlockKey) -> None:
        with self._lock:
            del self._committed[key]

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._committed

    def __len__(self) -> int:
        return len(self._committed)

    def keys(self) -> list[BlockKey]:
        with self._lock:
            return list(self._committed)

    def used_bytes(self) -> int:
        with self._lock:
            return sum(content.size for _, content in [*self._committed.values(), *self._prepared.values()])

    def close(self) -> None:
        with self._lock:
            self._offered.clear()
            self._prepared.clear()
            self._committed.clear()

    def _refuse_known(self, key: BlockKey) -> None:
        if key in self._committed or key in self._prepared or key in self._offered:
            raise TierError(f"block {key} is lent or offered already; take it back first.")
