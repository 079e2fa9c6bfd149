"""The contract of `TierStore`. Subclass `StoreContract`, give it the fixture `store`, and run pytest over it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from sagellm.core.errors import CapacityError, TierError
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_runtime.base import StoredBlock, StoreFullError

BLOCK_BYTES = 5000  # no whole pages
NUM_BLOCKS = 6  # room of each store under test


def block(key: int, **fields: Any) -> CachedBlock:
    return CachedBlock(BlockKey(key), **{"size_bytes": BLOCK_BYTES, **fields})


def content(key: int, size_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """uint8 [size_bytes] that no other key has."""
    return np.random.default_rng(key).integers(0, 256, size_bytes, dtype=np.uint8)


def digest(key: int) -> bytes:
    return key.to_bytes(16, "little")


def put(store: Any, key: int, **fields: Any) -> None:
    store.prepare(block(key, **fields), digest(key))[:] = content(key)
    store.commit(BlockKey(key))


class StoreContract:
    def test_what_is_committed_is_read(self, store: Any):
        fields = dict(parent=BlockKey(2**64 - 1), depth=7, num_tokens=64, cost_s=0.25, tenant_id="Größe", time_s=1.5)
        put(store, 2**63, **fields)
        assert np.array_equal(store.read(2**63), content(2**63))
        assert store.describe(2**63) == StoredBlock(block(2**63, **fields), digest(2**63))
        assert 2**63 in store and len(store) == 1 and store.keys() == [2**63]

    def test_what_is_prepared_is_not_found(self, store: Any):
        room = store.prepare(block(1))
        assert room.shape == (BLOCK_BYTES,) and room.dtype == np.uint8 and room.flags.writeable
        assert 1 not in store and len(store) == 0 and store.keys() == []
        for ask in (store.read, store.describe, store.remove):
            with pytest.raises(KeyError):
                ask(1)
        assert store.used_bytes() >= BLOCK_BYTES

    def test_an_abort_leaves_nothing(self, store: Any):
        store.prepare(block(1))[:] = content(1)
        store.abort(1)
        assert 1 not in store and store.used_bytes() == 0
        with pytest.raises(KeyError):
            store.commit(1)
        with pytest.raises(KeyError):
            store.abort(1)
        put(store, 1)
        assert np.array_equal(store.read(1), content(1))

    def test_into_is_filled(self, store: Any):
        put(store, 1)
        into = np.zeros(BLOCK_BYTES, np.uint8)
        assert store.read(1, into) is into
        assert np.array_equal(into, content(1))
        with pytest.raises(TierError, match="give as many"):
            store.read(1, np.zeros(BLOCK_BYTES - 1, np.uint8))

    def test_a_copy_is_read(self, store: Any):
        put(store, 1)
        store.read(1)[:] = 0
        assert np.array_equal(store.read(1), content(1))

    def test_another_digest_is_another_block(self, store: Any):
        put(store, 1)
        assert np.array_equal(store.read(1, digest=digest(1)), content(1))
        with pytest.raises(KeyError):
            store.read(1, digest=digest(2))
        assert 1 in store

    def test_a_key_is_there_once(self, store: Any):
        put(store, 1)
        store.prepare(block(2))
        for key in (1, 2):
            with pytest.raises(TierError, match="remove"):
                store.prepare(block(key))
        assert np.array_equal(store.read(1), content(1))

    def test_a_full_store_says_so_and_goes_on(self, store: Any):
        for key in range(NUM_BLOCKS):
            put(store, key)
        with pytest.raises(StoreFullError) as caught:
            store.prepare(block(99))
        assert isinstance(caught.value, TierError) and isinstance(caught.value, CapacityError)
        assert store.used_bytes() <= store.capacity_bytes
        store.remove(3)
        put(store, 99)
        assert sorted(store.keys()) == [0, 1, 2, 4, 5, 99]
        assert all(np.array_equal(store.read(key), content(key)) for key in sorted(store.keys()))

    def test_what_is_prepared_takes_room(self, store: Any):
        for key in range(NUM_BLOCKS):
            store.prepare(block(key))
        with pytest.raises(StoreFullError):
            store.prepare(block(99))
        store.abort(0)
        store.prepare(block(99))

    def test_removed_is_gone(self, store: Any):
        put(store, 1)
        store.remove(1)
        assert 1 not in store and store.used_bytes() == 0
        for ask in (store.read, store.describe, store.remove):
            with pytest.raises(KeyError):
                ask(1)

    def test_a_closed_store_refuses(self, store: Any):
        put(store, 1)
        store.prepare(block(2))
        store.close()
        store.close()
        assert len(store) == 0 and store.used_bytes() == 0
        with pytest.raises(TierError, match="closed"):
            store.prepare(block(3))
        with pytest.raises(KeyError):
            store.read(1)

    @pytest.mark.parametrize("size_bytes", [0, -1])
    def test_a_block_has_bytes(self, store: Any, size_bytes: int):
        with pytest.raises(TierError):
            store.prepare(block(1, size_bytes=size_bytes))
        assert store.used_bytes() == 0

    def test_threads_never_see_another_block(self, store: Any):
        """Writers write and remove blocks of three keys while readers read them: whole, or not there."""
        stop = threading.Event()

        def write(key: int) -> None:
            for _ in range(40):
                put(store, key)
                store.remove(key)

        def read(key: int) -> int:
            wrong = 0
            while not stop.is_set():
                try:
                    wrong += not np.array_equal(store.read(key), content(key))
                except KeyError:
                    pass
                except TierError as error:  # its file went between two steps of the reader
                    assert "missing" in str(error)
            return wrong

        with ThreadPoolExecutor(6) as pool:
            readers = [pool.submit(read, key) for key in range(3)]
            for writer in [pool.submit(write, key) for key in range(3)]:
                writer.result()
            stop.set()
            assert sum(reader.result() for reader in readers) == 0
        assert store.used_bytes() == 0
