"""An index as bytes: nothing lost but locks, and nothing but a whole snapshot taken for one."""

import itertools
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from sagellm.core.errors import LockError, PrefixIndexError
from sagellm.prefix_reuse import PrefixReuseIndex, ReferencePrefixIndex
from tests.prefix_reuse.cases import contents, places, rows, sequence


def fill(index, seed: int = 0) -> None:
    """Several namespaces and tiers, shared prefixes, metadata, locks, gaps where something was removed."""
    rng = random.Random(seed)
    for number in range(40):
        path = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        namespace = rng.choice(["", "a", "b\0ü"])
        ids = range(10 * number, 10 * number + len(path))
        metadata = {"turn": number} if number % 5 == 0 else None
        tier = rng.choice(["gpu", "gpu", "cpu", "nvme"])
        index.insert(sequence(path, index.block_size), ids, namespace, tier=tier, metadata=metadata)
        index.lookup(sequence(path[:2], index.block_size), namespace, lock=number % 9 == 0)
        if number % 8 == 7:
            index.evict_lru(3)


@pytest.fixture(params=[1, 2, 16])
def filled(request, make):
    index = make(request.param)
    fill(index)
    return index


def test_the_same_index_again(filled):
    copy = type(filled).restore(filled.snapshot())
    copy.check()
    unlocked = [row[:-1] for row in rows(filled.blocks())]
    assert [row[:-1] for row in rows(copy.blocks())] == unlocked and len(unlocked) > 20
    assert {row[-1] for row in rows(copy.blocks())} == {0}
    assert contents(copy) == contents(filled)
    assert any(metadata for ends in contents(copy).values() for *_, metadata in ends)
    assert copy.block_size == filled.block_size
    assert copy.events().last_sequence == filled.events().last_sequence


def test_the_same_bytes_again(filled):
    data = filled.snapshot()
    assert isinstance(data, bytes)
    assert type(filled).restore(data).snapshot() == data == filled.snapshot()


def test_the_same_order_of_eviction(filled):
    copy = type(filled).restore(filled.snapshot())
    original = type(filled).restore(filled.snapshot())
    for tier, number in itertools.product(["cpu", "gpu", "nvme"], [1, 3, 100]):
        assert places(original.evict_lru(number, tier)) == places(copy.evict_lru(number, tier))
    assert copy.num_blocks() == 0


def test_what_was_unlocked_is_evicted_in_the_same_order(make):
    index = make()
    fill(index, seed=2)
    copy = type(index).restore(index.snapshot())
    locked = {row[1] for row in rows(index.blocks()) if row[-1]}
    assert locked
    order = [block for block in copy.select_lru(1000).tolist() if block not in locked]
    assert index.select_lru(1000).tolist() == order


def test_the_counter_goes_on(filled):
    copy = type(filled).restore(filled.snapshot())
    for index in (filled, copy):
        index.insert(sequence([9], index.block_size), [5000])
    newest = {row[3] for row in rows(copy.blocks()) if row[1] == 5000}
    assert newest == {row[3] for row in rows(filled.blocks()) if row[1] == 5000}
    assert newest == {max(row[3] for row in rows(copy.blocks()))}


def test_locks_and_counters_are_not_in_it(make):
    index = make()
    index.insert([1, 2], [0])
    lock = index.lookup([1, 2], lock=True).lock
    copy = type(index).restore(index.snapshot())
    assert copy.metrics()["locks"] == copy.metrics()["lookups"] == copy.metrics()["inserts"] == 0
    with pytest.raises(LockError):
        copy.unlock(lock)
    assert len(copy.evict_lru(1)) == 1
    index.unlock(lock)


def test_an_empty_one(make):
    index = make(7)
    index.lookup([1], lock=True)
    copy = type(index).restore(index.snapshot())
    assert (copy.block_size, copy.num_blocks(), copy.namespaces()) == (7, 0, [])
    assert copy.snapshot() == index.snapshot()


def test_the_original_and_the_copy_go_their_own_ways(filled):
    copy = type(filled).restore(filled.snapshot())
    before = rows(filled.blocks())
    copy.clear()
    assert rows(filled.blocks()) == before


def test_events_of_a_copy(make):
    index = make()
    index.insert([1, 2], [0])
    copy = type(index).restore(index.snapshot(), event_capacity=5)
    assert copy.events(1) == ((), 0, 1)
    assert copy.events(0).num_lost == 1
    copy.insert([3, 4], [1])
    assert [event.sequence for event in copy.events(1).events] == [2]


def test_cut_short_or_changed_anywhere(make):
    index = make()
    fill(index)
    data = index.snapshot()
    for length in [*range(0, 200), *range(200, len(data), 97), len(data) - 1]:
        refuse(index, data[:length])
    rng = random.Random(5)
    for position in [*range(0, 100), *[rng.randrange(len(data)) for _ in range(300)], len(data) - 1]:
        changed = bytearray(data)
        changed[position] ^= 1 << rng.randrange(8)
        refuse(index, bytes(changed))
    refuse(index, data + b"\0")
    refuse(index, data + data)


def refuse(index, data) -> None:
    with pytest.raises(PrefixIndexError) as caught:
        type(index).restore(data)
    assert len(str(caught.value)) > 30


@pytest.mark.parametrize("data", [b"", b"{}", b"[1, 2]", os.urandom(1000), bytes(10_000), np.arange(100).tobytes()])
def test_foreign_bytes(index_class, data):
    refuse(index_class(2), data)


@pytest.mark.parametrize("data", ["text", None, 7, [1, 2], {"a": 1}])
def test_no_bytes(index_class, data):
    refuse(index_class(2), data)


def test_of_the_other_implementation():
    for one, other in itertools.permutations([ReferencePrefixIndex(2), PrefixReuseIndex(2)]):
        one.insert([1, 2], [0])
        refuse(other, one.snapshot())


def test_lies_with_a_true_checksum():
    """Bytes made to look whole: whatever they say, an error or an index that is consistent, never a crash."""
    index = PrefixReuseIndex(2)
    fill(index)
    data = index.snapshot()
    rng = random.Random(7)
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        changed = bytearray(data[:-8])
        for _ in range(rng.choice([1, 1, 1, 4])):
            position = rng.randrange(8, len(changed))
            changed[position] = rng.choice([0, 1, 2, 127, 255, rng.randrange(256)])
        try:
            copy = PrefixReuseIndex.restore(bytes(changed) + checksum(bytes(changed)))
        except PrefixIndexError as error:
            assert "checksum" not in str(error)
            outcomes[False] += 1
            continue
        copy.check()
        outcomes[True] += 1
        assert copy.evict_lru(1000).kv_block_ids.tolist() == [] or copy.num_blocks("gpu") == 0
    assert min(outcomes.values()) > 100


def checksum(data: bytes) -> bytes:
    """As the native snapshot ends; see csrc/src/snapshot.cpp."""
    from sagellm.prefix_reuse.matcher import SALT, fold

    state = SALT[0] ^ len(data)
    for start in range(0, len(data), 8):
        state = fold(state ^ SALT[1], int.from_bytes(data[start : start + 8], "little") ^ SALT[2])
    return state.to_bytes(8, "little")


def test_in_another_process(tmp_path, index_class):
    index = index_class(2)
    fill(index)
    (tmp_path / "index").write_bytes(index.snapshot())
    code = (
        "import sys, pathlib; from sagellm import prefix_reuse; path = pathlib.Path(sys.argv[1]);"
        "index = getattr(prefix_reuse, sys.argv[2]).restore(path.read_bytes()); path.write_bytes(index.snapshot())"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "index", index_class.__name__], check=True)
    assert (tmp_path / "index").read_bytes() == index.snapshot()
