"""Moves between stores: whole or not at all, in the order asked, each block once."""

from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sagellm.core.errors import TierError
from sagellm.core.hooks import MigrationPlan, MigrationResult, Tier
from sagellm.kv_runtime.disk_store import DiskStore
from sagellm.kv_runtime.lent_store import LentStore
from sagellm.kv_runtime.migrator import KVMigrator
from tests.kv_runtime.faulty_store import LIMIT_S, FaultyStore
from tests.kv_runtime.migration_setup import LOAD, SAVE, Setup, late
from tests.kv_runtime.store_contract import BLOCK_BYTES, block, content, digest, put


def test_blocks_go_down_and_come_back(setup: Setup):
    for key in range(4):
        put(setup.host, key, parent=77, depth=key + 1, tenant_id="t")
    assert setup.outcome(SAVE, 2, 0, 3) == MigrationResult((2, 0, 3), {})
    assert setup.host.keys() == [1] and sorted(setup.disk.keys()) == [0, 2, 3]
    assert setup.disk.describe(2) == (block(2, parent=77, depth=3, tenant_id="t"), digest(2))
    setup.check()
    assert setup.outcome(LOAD, 0, 3) == MigrationResult((0, 3), {})
    assert sorted(setup.host.keys()) == [0, 1, 3] and setup.disk.keys() == [2]
    assert setup.counts() == {"cpu>nvme moved": 3, "nvme>cpu moved": 2}


def test_a_copy_leaves_the_source_as_it_is(setup: Setup):
    put(setup.host, 1)
    assert setup.outcome(SAVE, 1, keep_source=True).moved == (1,)
    assert 1 in setup.host and 1 in setup.disk


def test_a_block_is_in_one_place_or_both_never_in_none(setup: Setup):
    put(setup.host, 1)
    arrived, go_on = setup.disk.hang("commit")
    future = setup.move(SAVE, 1)
    assert arrived.wait(LIMIT_S)
    assert 1 in setup.host and 1 not in setup.disk
    go_on.set()
    assert future.result(LIMIT_S).moved == (1,)
    names = [("prepare", 1), ("commit", 1)]
    assert setup.disk.events == names and setup.host.events[-1] == ("remove", 1)


def test_what_is_not_there_or_another_block_is_missing(setup: Setup):
    put(setup.disk, 1)
    put(setup.disk, 2)
    result = setup.outcome(LOAD, 1, 2, 3, digests={1: digest(1), 2: digest(5), 3: digest(3)})
    assert result == MigrationResult((1,), {2: "missing", 3: "missing"})
    assert 2 in setup.disk and 2 not in setup.host


def test_a_block_in_flight_is_not_moved_twice(setup: Setup):
    put(setup.host, 1)
    put(setup.host, 2)
    arrived, go_on = setup.disk.hang("prepare")
    first = setup.move(SAVE, 1, 1)
    assert arrived.wait(LIMIT_S)
    second = setup.move(SAVE, 2, 1)
    go_on.set()
    assert first.result(LIMIT_S) == MigrationResult((1,), {})
    assert second.result(LIMIT_S) == MigrationResult((2,), {1: "in flight"})
    assert setup.outcome(LOAD, 1).moved == (1,)


def test_a_full_queue_refuses_at_once(tmp_path: Path):
    setup = Setup(tmp_path, num_threads=1, max_queued_bytes=2 * BLOCK_BYTES)
    for key in range(4):
        put(setup.host, key)
    arrived, go_on = setup.disk.hang("prepare")
    first = setup.move(SAVE, 0, 1)
    assert arrived.wait(LIMIT_S)
    assert setup.outcome(SAVE, 2, 3).refused == {2: "queue full", 3: "queue full"}
    go_on.set()
    assert first.result(LIMIT_S).moved == (0, 1)
    setup.migrator.close()
    setup.disk.close()


def test_loads_go_before_saves(setup: Setup):
    for key in (1, 2):
        put(setup.host, key)
    put(setup.disk, 3)
    arrived, go_on = setup.disk.hang("prepare")
    saves = [setup.move(SAVE, 1)]
    assert arrived.wait(LIMIT_S)
    saves.append(setup.move(SAVE, 2))
    load = setup.move(LOAD, 3)
    setup.host.events.clear()
    go_on.set()
    assert all(future.result(LIMIT_S).moved for future in [load, *saves])
    assert [key for name, key in setup.host.events if name in ("prepare", "read")] == [1, 3, 2]


def test_copies_are_measured(setup: Setup):
    assert setup.migrator.samples(*SAVE) == []
    for key in range(3):
        put(setup.host, key)
    setup.outcome(SAVE, 0, 1, 2, 9)
    samples = setup.migrator.samples(*SAVE)
    assert sum(size for size, _ in samples) == 3 * BLOCK_BYTES and all(seconds > 0 for _, seconds in samples)
    assert [tuple(row)[2:] for row in setup.migrator.counts()] == [("missing", 1, 0), ("moved", 3, 3 * BLOCK_BYTES)]


def test_tiers_without_a_store(setup: Setup):
    for tiers in ((Tier.GPU, Tier.CPU), (Tier.CPU, Tier.CPU)):
        with pytest.raises(TierError, match="has stores for cpu, nvme"):
            setup.move(tiers, 1)


def test_a_migrator_has_threads_and_one_store_a_tier(setup: Setup):
    for stores, num_threads in (([setup.host, setup.disk], 0), ([setup.host, setup.host], 1)):
        with pytest.raises(TierError, match="needs 1 thread and one store a tier"):
            KVMigrator(stores, num_threads=num_threads)


def test_an_empty_plan_is_done(setup: Setup):
    assert setup.outcome(SAVE) == MigrationResult((), {})


def test_memory_of_an_engine_takes_part(tmp_path: Path):
    """Lent blocks are saved, offered ones filled; what is late never writes into memory after on_done."""
    lent = LentStore(Tier.CPU, 1 << 20)
    disk = FaultyStore(DiskStore(tmp_path, 1 << 20, layout="a model"))
    migrator = KVMigrator([lent, disk], num_threads=1)
    lent.lend(block(1), content(1), digest(1))
    plan = MigrationPlan(*SAVE, (1,))
    assert migrator.migrate(plan, keep_source=True).result(LIMIT_S).moved == (1,)
    assert lent.take_back(1) and 1 not in lent

    room = np.zeros(BLOCK_BYTES, np.uint8)
    plan = MigrationPlan(*LOAD, (1,))
    assert migrator.migrate(plan).result(LIMIT_S).refused == {1: "full"}
    lent.offer(1, room)
    arrived, go_on = disk.hang("read")
    _, done = late(migrator, plan, arrived, keep_source=True)
    with pytest.raises(TierError, match="is being written"):
        lent.take_back(1)
    go_on.set()
    done.result(LIMIT_S)
    assert not lent.take_back(1)

    lent.offer(1, room)
    assert migrator.migrate(plan, keep_source=True, digests={1: digest(1)}).result(LIMIT_S).moved == (1,)
    assert lent.take_back(1) and np.array_equal(room, content(1)) and 1 in disk
    migrator.close()
    disk.close()


def test_many_threads_ask_and_cancel(tmp_path: Path):
    """In any order of events, every future ends, every block is somewhere, and nothing is left prepared."""
    setup = Setup(tmp_path, num_threads=3)
    for key in range(4):
        put(setup.host, key)

    def ask(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(30):
            keys = random.permutation(4)[: random.integers(1, 5)].tolist()
            tiers = SAVE if random.random() < 0.5 else LOAD
            future = setup.move(tiers, *keys, deadline_s=float(random.choice([0.0, 1e-4, LIMIT_S])))
            if random.random() < 0.3:
                future.cancel()
            try:
                result = future.result(LIMIT_S)
            except CancelledError:
                continue
            assert {*result.moved} | result.refused.keys() == {*keys}

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))
    setup.migrator.close()
    assert sorted({*setup.host.keys(), *setup.disk.keys()}) == [0, 1, 2, 3]
    setup.check()
    setup.disk.close()
