"""The store in files: the contract, restarts, and the order of use."""

import os
from pathlib import Path

import numpy as np
import pytest

from sagellm.core.errors import TierError
from sagellm.kv_runtime.disk_store import DiskStore
from sagellm.kv_runtime.disk_store_folder import LockedFolder
from sagellm.kv_runtime.disk_store_format import MAX_TENANT_BYTES, record_bytes
from tests.kv_runtime.store_contract import BLOCK_BYTES, NUM_BLOCKS, StoreContract, block, content, digest, put

CAPACITY = NUM_BLOCKS * record_bytes(BLOCK_BYTES)


def open_store(folder: Path, capacity_bytes: int = CAPACITY, layout: str = "a model", **options: object) -> DiskStore:
    return DiskStore(folder, capacity_bytes, layout=layout, **options)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    store = open_store(tmp_path / "new" / "tier")
    yield store
    store.close()


class TestContract(StoreContract):
    pass


def files(folder: Path, suffix: str = "kv") -> list[Path]:
    return sorted(folder.rglob(f"*.{suffix}"))


@pytest.mark.parametrize("sync", [False, True])
def test_blocks_survive_a_restart(tmp_path: Path, sync: bool):
    first = open_store(tmp_path, sync=sync)
    fields = dict(parent=9, depth=3, num_tokens=64, tenant_id="t", cost_s=0.5, time_s=2.0)
    put(first, 1, **fields)
    put(first, 2)
    first.prepare(block(3))
    first.close()
    second = open_store(tmp_path, sync=sync)
    assert second.keys() == [1, 2] and second.counters() == {}
    assert second.describe(1) == (block(1, **fields), digest(1))
    assert second.describe(2).block.parent is None
    assert all(np.array_equal(second.read(key, digest=digest(key)), content(key)) for key in (1, 2))
    assert second.used_bytes() == 2 * record_bytes(BLOCK_BYTES)
    second.close()


def test_the_order_of_use_survives_a_restart(tmp_path: Path):
    store = open_store(tmp_path)
    for key in (5, 1, 3, 2):
        put(store, key)
    store.read(1)
    store.read(5)
    assert store.keys() == [3, 2, 1, 5]
    store.close()
    store = open_store(tmp_path)
    assert [one.block.key for one in store.blocks()] == [3, 2, 1, 5]
    put(store, 4)  # after the others, also if the clock was set back
    store.close()
    store = open_store(tmp_path)
    assert store.keys() == [3, 2, 1, 5, 4]
    store.close()


def test_a_smaller_bound_drops_what_was_used_least_recently(tmp_path: Path):
    store = open_store(tmp_path)
    for key in range(6):
        put(store, key)
    store.read(0)
    store.close()
    store = open_store(tmp_path, capacity_bytes=3 * record_bytes(BLOCK_BYTES))
    assert store.keys() == [4, 5, 0] and store.counters() == {"dropped over capacity": 3}
    assert store.used_bytes() == store.capacity_bytes and len(files(tmp_path)) == 3
    store.close()


def test_the_bound_counts_what_files_take(store: DiskStore):
    assert store.capacity_blocks(BLOCK_BYTES) == NUM_BLOCKS
    put(store, 1)
    (file,) = files(store._folder.path)
    assert file.stat().st_size <= store.used_bytes() == record_bytes(BLOCK_BYTES)


def test_another_layout_is_never_served(tmp_path: Path):
    store = open_store(tmp_path)
    put(store, 1)
    store.close()
    with pytest.raises(TierError, match="1 blocks of another model or layout; name another folder"):
        open_store(tmp_path, layout="another model", other_layout="refuse")
    store = open_store(tmp_path)
    assert store.keys() == [1]
    store.close()
    store = open_store(tmp_path, layout="another model")
    assert store.keys() == [] and store.counters() == {"dropped other layout": 1} and not files(tmp_path)
    store.close()


def test_only_files_of_the_store_are_touched(tmp_path: Path):
    others = [tmp_path / name for name in ("notes.kv", "0123456789abcdef-1.kv.bak", "0123456789abcdef.kv", "x.tmp")]
    for file in others:
        file.write_text("mine")
    (tmp_path / "0123456789abcdef-1.kv").mkdir()
    store = open_store(tmp_path)
    put(store, 1)
    store.close()
    assert all(file.read_text() == "mine" for file in others) and (tmp_path / "0123456789abcdef-1.kv").is_dir()


def put_content(store: DiskStore, key: int, its_content: int) -> None:
    """`put` with the content of another key."""
    store.prepare(block(key), digest(key))[:] = content(its_content)
    store.commit(key)


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("is_reopened", [False, True])
def test_of_two_files_of_a_block_the_newer_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reopened: bool, is_reversed: bool
):
    """A writer that was killed between the end of a removal and the next write of the same block: in one life of the store or
    two, and in whatever order the folder lists them."""
    store = open_store(tmp_path)
    put_content(store, 1, its_content=2)
    if is_reopened:
        store.close()
        store = open_store(tmp_path)
    (old,) = files(tmp_path)
    kept = old.read_bytes()
    store.remove(1)
    put(store, 1)
    (new,) = files(tmp_path)
    store.close()
    assert new != old
    old.write_bytes(kept)
    names = LockedFolder.names
    monkeypatch.setattr(LockedFolder, "names", lambda folder: sorted(names(folder), reverse=is_reversed))
    store = open_store(tmp_path)
    assert store.keys() == [1] and store.counters() == {"dropped superseded": 1}
    assert np.array_equal(store.read(1), content(1)) and files(tmp_path) == [new]
    store.close()


def test_a_removed_block_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Removed and written anew between the reader's look at the books and its look at the file."""
    store = open_store(tmp_path)
    put(store, 1)
    opened = os.open

    def race(path: object, *rest: object, **more: object) -> int:
        monkeypatch.setattr(os, "open", opened)
        store.remove(1)
        put(store, 1)
        return opened(path, *rest, **more)

    monkeypatch.setattr(os, "open", race)
    with pytest.raises(TierError, match="missing"):
        store.read(1)
    assert np.array_equal(store.read(1), content(1)), "the new one was not dropped with the old one"
    store.close()


@pytest.mark.parametrize(
    ("fields", "its_digest", "text"),
    [
        ({}, b"short", "a digest of 5 bytes"),
        ({"tenant_id": "x" * (MAX_TENANT_BYTES + 1)}, b"", "a shorter name"),
        ({"tenant_id": "\ud800"}, b"", r"tenant '\\ud800' is no text"),
        ({"tenant_id": None}, b"", "tenant None is no text"),
        ({"key": -1}, b"", "block -1 does not fit into a header"),
        ({"key": 2**64}, b"", "key and parent are 0 to"),
        ({"key": 1.0}, b"", "block 1.0 does not fit"),
        ({"parent": -1}, b"", "does not fit"),
        ({"parent": 2**64}, b"", "does not fit"),
        ({"depth": -1}, b"", "does not fit"),
        ({"num_tokens": 2**32}, b"", "does not fit"),
        ({"cost_s": None}, b"", "does not fit"),
        ({"size_bytes": -1}, b"", "does not fit"),
    ],
)
def test_blocks_that_no_header_can_describe(store: DiskStore, fields: dict, its_digest: bytes, text: str):
    with pytest.raises(TierError, match=text):
        store.prepare(block(1)._replace(**fields), its_digest)
    assert store.used_bytes() == 0


def test_buffers_are_used_again(store: DiskStore):
    for key in range(NUM_BLOCKS):
        put(store, key)
    assert store.counters() == {"writes": NUM_BLOCKS, "written bytes": NUM_BLOCKS * BLOCK_BYTES}
    assert all(np.array_equal(store.read(key), content(key)) for key in range(NUM_BLOCKS))


def test_a_bound_below_one_block_is_refused(tmp_path: Path):
    with pytest.raises(TierError, match="holds no block"):
        open_store(tmp_path, capacity_bytes=4096)
