"""Random calls on the disk store beside a dictionary, among them restarts and damage to its files."""

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sagellm.core.errors import TierError
from sagellm.kv_runtime.base import StoredBlock, StoreFullError
from sagellm.kv_runtime.disk_store import DiskStore
from sagellm.kv_runtime.disk_store_format import record_bytes
from tests.kv_runtime.store_contract import block, content, digest

SIZES = (1, 4096, 5000)
CAPACITY = 4
KEYS = st.sampled_from([0, 1, 2, 3, 2**63, 2**64 - 1])


class DiskMachine(RuleBasedStateMachine):
    """`committed` and `prepared` are the twin: {key: size}."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: dict[int, int] = {}
        self.prepared: dict[int, tuple[int, np.ndarray]] = {}
        self.store = self.open()

    def used(self) -> int:
        return sum(map(self.room, [*self.committed.values(), *(size for size, _ in self.prepared.values())]))

    @rule(key=KEYS, size=st.sampled_from(SIZES))
    def prepare(self, key: int, size: int) -> None:
        try:
            room = self.store.prepare(block(key, size_bytes=size, depth=size), digest(key))
        except StoreFullError:
            assert self.used() + self.room(size) > self.store.capacity_bytes
        except TierError:
            assert key in self.committed or key in self.prepared
        else:
            assert key not in self.committed and key not in self.prepared
            assert self.used() + self.room(size) <= self.store.capacity_bytes
            room[:] = content(key, size)
            self.prepared[key] = size, room

    @rule(key=KEYS)
    def commit(self, key: int) -> None:
        if key in self.prepared:
            self.store.commit(key)
            self.committed[key] = self.prepared.pop(key)[0]
        else:
            with pytest.raises(KeyError):
                self.store.commit(key)

    @rule(key=KEYS)
    def abort(self, key: int) -> None:
        if key in self.prepared:
            self.store.abort(key)
            del self.prepared[key]
        else:
            with pytest.raises(KeyError):
                self.store.abort(key)

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        if key in self.committed:
            self.store.remove(key)
            del self.committed[key]
        else:
            with pytest.raises(KeyError):
                self.store.remove(key)

    @rule(key=KEYS, wrong=st.booleans())
    def read(self, key: int, wrong: bool) -> None:
        if key in self.committed and not wrong:
            size = self.committed[key]
            assert np.array_equal(self.store.read(key, digest=digest(key)), content(key, size))
            assert self.store.describe(key) == StoredBlock(block(key, size_bytes=size, depth=size), digest(key))
            self.committed[key] = self.committed.pop(key)  # the last one used
        else:
            with pytest.raises(KeyError):
                self.store.read(key, digest=digest(5 if wrong else key))

    @invariant()
    def same(self) -> None:
        assert sorted(self.store.keys()) == sorted(self.committed) and len(self.store) == len(self.committed)
        assert all(key in self.store for key in self.committed)
        assert self.store.used_bytes() == self.used() <= self.store.capacity_bytes

    def open(self) -> DiskStore:
        self.folder = Path(tempfile.mkdtemp())
        return self.open_again()

    def open_again(self) -> DiskStore:
        return DiskStore(self.folder, CAPACITY * record_bytes(max(SIZES)), layout="a model")

    def room(self, size: int) -> int:
        return record_bytes(size)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.prepared.clear()
        self.store = self.open_again()

    @invariant()
    def order(self) -> None:
        assert self.store.keys() == list(self.committed)

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), place=st.integers(0, 2**20), restart=st.booleans())
    def damage(self, data: st.DataObject, place: int, restart: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.committed)))
        (file,) = self.folder.glob(f"{key:016x}-*.kv")
        broken = bytearray(file.read_bytes())
        broken[place % len(broken)] ^= 1
        file.write_bytes(broken)
        if restart:
            self.restart()
        if key in self.store:
            with pytest.raises(TierError, match="dropped"):
                self.store.read(key)
        del self.committed[key]
        # Writing to a file is a use of it, as far as the next start can see: but for this one, nothing has changed.

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
