"""A tier in memory of the host: a `TierStore` over a `KVPool`."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from sagellm.core.errors import CapacityError, TierError
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_runtime.base import BlockBytes, StoredBlock, StoreFullError
from sagellm.kv_runtime.pool import KVPool

__all__ = ["HostStore"]


class _Entry:
    """A block in a slot. `pins`: readers whose copy goes on; a block that is removed meanwhile keeps its slot for them."""

    __slots__ = ("block", "content", "digest", "pins", "removed", "slot")

    def __init__(self, block: CachedBlock, digest: bytes, slot: int, content: BlockBytes) -> None:
        self.block = block
        self.content = content
        self.digest = digest
        self.slot = slot
        self.pins = 0
        self.removed = False


class HostStore:
    """Blocks in slots of a pool, each at most as large as a slot. The store is the pool's only user.

    Copies are made outside the lock: a reader pins the block, so its slot is not given to another one before the copy ends.
    Memory keeps what it was given, so nothing is checksummed.
    """

    in_memory = True

    def __init__(self, pool: KVPool) -> None:
        self.tier = pool.tier
        self.capacity_bytes = pool.capacity_blocks * pool.block_bytes
        self._pool = pool
        self._lock = threading.Lock()
        self._prepared: dict[BlockKey, _Entry] = {}
        self._committed: dict[BlockKey, _Entry] = {}
        self._is_closed = False

    def prepare(self, block: CachedBlock, digest: bytes = b"") -> BlockBytes:
        key, size = block.key, block.size_bytes
        if not 0 < size <= self._pool.block_bytes:
            raise TierError(
                f"block {key} has {size} bytes; tier {self.tier.value} takes 1 to {self._pool.block_bytes} bytes a block."
            )
        with self._lock:
            if self._is_closed:
                raise TierError(f"the store of tier {self.tier.value} is closed; open a new one.")
            if key in self._committed or key in self._prepared:
                raise TierError(f"block {key} is on tier {self.tier.value} already, or on its way; remove it first.")
            try:
                slot = self._pool.allocate(1).block_ids[0]
            except CapacityError as error:
                raise StoreFullError(str(error)) from None
            content = self._pool.view(slot)[:size]
            self._prepared[key] = _Entry(block, digest, slot, content)
            return content

    def commit(self, key: BlockKey) -> None:
        with self._lock:
            self._committed[key] = self._prepared.pop(key)

    def abort(self, key: BlockKey) -> None:
        with self._lock:
            self._pool.free((self._prepared.pop(key).slot,))

    def read(self, key: BlockKey, into: BlockBytes | None = None, digest: bytes = b"") -> BlockBytes:
        entry = self._pin(key, digest)
        try:
            content = entry.content
            if into is None:
                return content.copy()
            if into.shape != content.shape:
                raise _misfit(entry, into)
            np.copyto(into, content)  # releases the interpreter's lock
            return into
        finally:
            self._unpin(entry)

    def read_each(
        self,
        wanted: Sequence[tuple[BlockKey, BlockBytes, bytes]],
        is_over: Callable[[], bool] = lambda: False,
        copy: Callable[[BlockBytes, BlockBytes], None] = np.copyto,
    ) -> list[Exception | None]:
        """`read` of several blocks, (key, into, digest), with little between two copies: for each None, or what `read` raises.
        Once `is_over` the rest is not read; the list is shorter then. `copy(into, content)` must release the interpreter's
        lock while it copies much."""
        pinned: list[_Entry | Exception] = []
        with self._lock:
            for key, into, digest in wanted:
                entry = self._committed.get(key)
                if entry is None or (digest and digest != entry.digest):
                    pinned.append(KeyError(key))
                elif into.shape != entry.content.shape:
                    pinned.append(_misfit(entry, into))
                else:
                    entry.pins += 1
                    pinned.append(entry)
        results: list[Exception | None] = []
        try:
            for entry, (_, into, _) in zip(pinned, wanted, strict=True):
                if is_over():
                    break
                if isinstance(entry, Exception):
                    results.append(entry)
                else:
                    copy(into, entry.content)
                    results.append(None)
        finally:
            with self._lock:
                for entry in pinned:
                    if isinstance(entry, _Entry):
                        self._let_go(entry)
        return results

    @contextmanager
    def pinned(self, key: BlockKey, digest: bytes = b"") -> Iterator[BlockBytes]:
        """uint8 [size_bytes], read-only: the block's own memory, which stays its until the end of the `with`, also when the
        block is removed meanwhile. Raises KeyError as `read`."""
        entry = self._pin(key, digest)
        content = entry.content.view()
        content.flags.writeable = False
        try:
            yield content
        finally:
            self._unpin(entry)

    def _pin(self, key: BlockKey, digest: bytes) -> _Entry:
        with self._lock:
            entry = self._committed[key]
            if digest and digest != entry.digest:
                raise KeyError(key)
            entry.pins += 1
            return entry

    def _unpin(self, entry: _Entry) -> None:
        with self._lock:
            self._let_go(entry)

    def _let_go(self, entry: _Entry) -> None:
        """With the lock held."""
        entry.pins -= 1
        if entry.removed and not entry.pins:
            self._pool.free((entry.slot,))

    def describe(self, key: BlockKey) -> StoredBlock:
        with self._lock:
            entry = self._committed[key]
            return StoredBlock(entry.block, entry.digest)

    def remove(self, key: BlockKey) -> None:
        with self._lock:
            self._drop(self._committed.pop(key))

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._committed

    def __len__(self) -> int:
        return len(self._committed)

    def keys(self) -> list[BlockKey]:
        with self._lock:
            return list(self._committed)

    def used_bytes(self) -> int:
        return self._pool.num_used * self._pool.block_bytes

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for entry in self._prepared.values():
                self._pool.free((entry.slot,))
            for entry in self._committed.values():
                self._drop(entry)
            self._prepared.clear()
            self._committed.clear()

    def _drop(self, entry: _Entry) -> None:
        """With the lock held."""
        entry.removed = True
        if not entry.pins:
            self._pool.free((entry.slot,))


def _misfit(entry: _Entry, into: BlockBytes) -> TierError:
    size = entry.content.size
    return TierError(f"block {entry.block.key} has {size} bytes, the memory to read it into {into.size}; give as many.")
