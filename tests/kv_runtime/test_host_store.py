"""The store in memory: the contract, and what only it has."""

import numpy as np
import pytest

from sagellm.core.errors import TierError
from sagellm.kv_runtime.base import StoreFullError
from sagellm.kv_runtime.host_store import HostStore
from sagellm.kv_runtime.pool import KVPool
from tests.kv_runtime.store_contract import BLOCK_BYTES, NUM_BLOCKS, StoreContract, block, content, digest, put


@pytest.fixture
def pool() -> KVPool:
    return KVPool(NUM_BLOCKS, BLOCK_BYTES)


@pytest.fixture
def store(pool: KVPool) -> HostStore:
    return HostStore(pool)


class TestContract(StoreContract):
    pass


def test_a_pinned_block_keeps_its_memory_when_it_is_removed(store: HostStore, pool: KVPool):
    put(store, 1)
    with store.pinned(1) as outer, store.pinned(1) as inner:
        store.remove(1)
        assert 1 not in store and pool.num_used == 1
        for key in range(2, 2 + NUM_BLOCKS - 1):
            put(store, key)
        with pytest.raises(StoreFullError):
            store.prepare(block(99))
        assert np.array_equal(outer, content(1)) and np.array_equal(inner, content(1))
        with pytest.raises(ValueError):
            inner[0] = 1
    assert pool.num_free == 1


def test_close_leaves_pinned_memory_alone(store: HostStore, pool: KVPool):
    put(store, 1)
    with store.pinned(1) as view:
        store.close()
        assert pool.num_used == 1 and np.array_equal(view, content(1))
    assert pool.num_used == 0


def test_a_block_may_be_smaller_than_its_slot_not_larger(store: HostStore):
    assert store.prepare(block(1, size_bytes=10)).shape == (10,)
    with pytest.raises(TierError, match=f"takes 1 to {BLOCK_BYTES} bytes"):
        store.prepare(block(2, size_bytes=BLOCK_BYTES + 1))


def test_several_blocks_are_read_at_once(store: HostStore):
    """Each with its own outcome; none once it is over; and no slot is kept, nor given away while it is read."""
    for key in range(3):
        put(store, key)
    rooms = [np.zeros(BLOCK_BYTES, np.uint8) for _ in range(3)] + [np.zeros(BLOCK_BYTES - 1, np.uint8)]
    wanted = [
        (0, rooms[0], b""),
        (1, rooms[1], digest(9)),
        (7, rooms[1], b""),
        (2, rooms[3], b""),
        (2, rooms[2], digest(2)),
    ]
    errors = store.read_each(wanted)
    assert [type(error) for error in errors] == [type(None), KeyError, KeyError, TierError, type(None)]
    assert all(np.array_equal(rooms[key], content(key)) for key in (0, 2)) and not rooms[1].any()

    def is_over() -> bool:
        """After the first; meanwhile the second is removed, and its slot taken if it can be."""
        if 1 not in store:
            return True
        store.remove(1)
        for key in range(10, 10 + NUM_BLOCKS - 3):
            put(store, key)
        with pytest.raises(StoreFullError):
            store.prepare(block(99))
        return False

    rooms[0][:] = 0
    assert store.read_each([(0, rooms[0], b""), (1, rooms[1], b"")], is_over) == [None]
    assert np.array_equal(rooms[0], content(0)) and not rooms[1].any()
    put(store, 1)
