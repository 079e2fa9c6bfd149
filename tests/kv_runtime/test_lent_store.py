"""Lent memory: what is shown is read, what is offered is written, and nothing else."""

import numpy as np
import pytest

from sagellm.core.errors import TierError
from sagellm.core.hooks import Tier
from sagellm.kv_runtime.base import StoredBlock, StoreFullError
from sagellm.kv_runtime.lent_store import LentStore
from tests.kv_runtime.store_contract import BLOCK_BYTES, block, content, digest


@pytest.fixture
def store() -> LentStore:
    return LentStore(Tier.CPU, 4 * BLOCK_BYTES)


def test_what_is_lent_is_read(store: LentStore):
    shown = content(1)
    shown.flags.writeable = False
    store.lend(block(1), shown, digest(1))
    assert np.array_equal(store.read(1), shown) and store.describe(1) == StoredBlock(block(1), digest(1))
    into = np.empty(BLOCK_BYTES, np.uint8)
    assert store.read(1, into, digest(1)) is into and np.array_equal(into, shown)
    with pytest.raises(KeyError):
        store.read(1, digest=digest(2))
    assert (store.keys(), len(store), store.used_bytes()) == ([1], 1, BLOCK_BYTES)
    assert store.take_back(1) and not store.take_back(1)
    with pytest.raises(KeyError):
        store.read(1)


def test_what_is_offered_is_written(store: LentStore):
    room = np.zeros(BLOCK_BYTES, np.uint8)
    store.offer(1, room)
    assert 1 not in store
    store.prepare(block(1), digest(1))[:] = content(1)
    with pytest.raises(TierError, match="is being written"):
        store.take_back(1)
    store.commit(1)
    assert np.array_equal(room, content(1)) and store.read(1, digest=digest(1)) is not room
    assert store.take_back(1)


def test_an_aborted_write_can_be_tried_again_or_taken_back(store: LentStore):
    store.offer(1, np.zeros(BLOCK_BYTES, np.uint8))
    store.prepare(block(1))
    store.abort(1)
    store.prepare(block(1))
    store.abort(1)
    assert not store.take_back(1)
    with pytest.raises(StoreFullError, match="no room was offered for block 1"):
        store.prepare(block(1))


def test_a_key_is_lent_or_offered_once(store: LentStore):
    store.lend(block(1), content(1))
    store.offer(2, content(2))
    for key in (1, 2):
        with pytest.raises(TierError, match="take it back first"):
            store.lend(block(key), content(key))
        with pytest.raises(TierError, match="take it back first"):
            store.offer(key, content(key))


def test_sizes_must_fit(store: LentStore):
    with pytest.raises(TierError, match="the memory lent 5"):
        store.lend(block(1), content(1, 5))
    store.offer(1, content(1, 5))
    with pytest.raises(TierError, match="the room offered 5"):
        store.prepare(block(1))
    store.lend(block(2), content(2))
    with pytest.raises(TierError, match="give as many"):
        store.read(2, content(2, 5))


def test_close_forgets_everything(store: LentStore):
    store.lend(block(1), content(1))
    store.close()
    assert len(store) == 0 and store.used_bytes() == 0
