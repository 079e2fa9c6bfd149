"""Moves between stores: whole or not at all, in time or refused, whatever the stores do."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sagellm.core.errors import TierError
from sagellm.core.hooks import MigrationPlan, MigrationResult, Tier
from sagellm.kv_runtime.base import StoreFullError
from sagellm.kv_runtime.disk_store import DiskStore
from sagellm.kv_runtime.disk_store_format import record_bytes
from sagellm.kv_runtime.host_store import HostStore
from sagellm.kv_runtime.lent_store import LentStore
from sagellm.kv_runtime.migrator import KVMigrator
from sagellm.kv_runtime.pool import KVPool
from tests.kv_runtime.faulty_store import LIMIT_S, FaultyStore
from tests.kv_runtime.store_contract import BLOCK_BYTES, NUM_BLOCKS, block, content, digest, put

SAVE = (Tier.CPU, Tier.NVME)
LOAD = (Tier.NVME, Tier.CPU)


class Setup:
    """A host store and one on disk that can be made to fail, and a migrator between them."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.host = FaultyStore(HostStore(KVPool(NUM_BLOCKS, BLOCK_BYTES)))
        self.disk = FaultyStore(DiskStore(folder, NUM_BLOCKS * record_bytes(BLOCK_BYTES), layout="a model"))
        self.migrator = KVMigrator([self.host, self.disk], **options)

    def move(self, tiers: tuple[Tier, Tier], *keys: int, **options: Any) -> Future[MigrationResult]:
        return self.migrator.migrate(MigrationPlan(*tiers, keys), **options)

    def outcome(self, tiers: tuple[Tier, Tier], *keys: int, **options: Any) -> MigrationResult:
        return self.move(tiers, *keys, **options).result(LIMIT_S)

    def counts(self) -> dict[str, int]:
        return {
            f"{row.src_tier.value}>{row.dst_tier.value} {row.outcome}": row.num_blocks for row in self.migrator.counts()
        }

    def check(self) -> None:
        """Nothing is prepared anywhere, and every block is what its key says."""
        for store, size in ((self.host, BLOCK_BYTES), (self.disk, record_bytes(BLOCK_BYTES))):
            assert store.used_bytes() == len(store) * size
            assert all(np.array_equal(store.store.read(key), content(key)) for key in sorted(store.keys()))


def late(migrator: KVMigrator, plan: MigrationPlan, arrived: threading.Event, **options: Any) -> tuple[Future, Future]:
    """(future, what `on_done` is told) of a move that is late inside a store that hangs, and not before it came there."""
    deadline_s = 0.01
    while True:
        done: Future[MigrationResult] = Future()
        future = migrator.migrate(plan, deadline_s=deadline_s, on_done=done.set_result, **options)
        assert future.result(LIMIT_S) == MigrationResult((), dict.fromkeys(plan.block_ids, "deadline"))
        if arrived.is_set():
            return future, done
        deadline_s *= 2  # another process had the core


def waiting_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path, num_threads=1)
    yield setup
    setup.migrator.close()
    setup.check()
    setup.disk.close()


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


def test_a_full_target_refuses_and_the_rest_of_the_plan_stays(setup: Setup):
    for key in range(NUM_BLOCKS - 1):
        put(setup.disk, 100 + key)
    put(setup.host, 1)
    put(setup.host, 2)
    assert setup.outcome(SAVE, 1, 2) == MigrationResult((1,), {2: "full"})
    assert setup.host.keys() == [2]


@pytest.mark.parametrize(
    ("where", "call", "error", "reason"),
    [
        ("disk", "prepare", StoreFullError("no"), "full"),
        ("disk", "prepare", TierError("read-only"), "failed: read-only"),
        ("host", "read", TierError("a copy failed"), "failed: a copy failed"),
        ("host", "read", KeyError(1), "missing"),
        ("host", "read", ZeroDivisionError("oops"), "failed: ZeroDivisionError('oops')"),
        ("host", "read", MemoryError(), "failed: MemoryError()"),
    ],
)
def test_a_store_that_fails_refuses_its_block_only(setup: Setup, where: str, call: str, error: Exception, reason: str):
    put(setup.host, 1)
    getattr(setup, where).fail[call] = error
    assert setup.outcome(SAVE, 1) == MigrationResult((), {1: reason})
    assert 1 in setup.host and 1 not in setup.disk and setup.disk.used_bytes() == 0
    getattr(setup, where).fail.clear()
    assert setup.outcome(SAVE, 1).moved == (1,)
    assert setup.counts() == {f"cpu>nvme {reason.partition(':')[0]}": 1, "cpu>nvme moved": 1}


def test_a_store_that_cannot_even_abort_does_not_stop_the_others(setup: Setup):
    for key in range(3):
        put(setup.host, key)
    setup.host.fail["read"] = TierError("a copy failed")
    setup.disk.fail["abort"] = ZeroDivisionError("oops")
    result = setup.outcome(SAVE, 0, 1)
    assert result.refused == {0: "failed: a copy failed", 1: "failed: ZeroDivisionError('oops')"}
    setup.host.fail.clear()
    setup.disk.fail.clear()
    assert setup.outcome(SAVE, 2).moved == (2,)
    for key in (0, 1):
        setup.disk.abort(key)


def test_a_corrupt_block_is_refused_and_leaves_no_trace(setup: Setup):
    put(setup.disk, 1)
    put(setup.disk, 2)
    setup.disk.corrupt.add(1)
    result = setup.outcome(LOAD, 1, 2)
    assert result.moved == (2,) and "corrupt" in result.refused[1]
    assert setup.host.keys() == [2] and len(setup.disk) == 0


@pytest.mark.parametrize("call", ["prepare", "commit", "read"])
def test_a_deadline_holds_while_a_store_hangs(setup: Setup, call: str):
    """The future ends; the block is in flight until the store comes back, and then it is as if nothing had been asked."""
    put(setup.host, 1)
    put(setup.host, 2)
    store = setup.host if call == "read" else setup.disk
    arrived, go_on = store.hang(call)
    future, done = late(setup.migrator, MigrationPlan(*SAVE, (1, 2)), arrived)
    assert not done.done()
    assert setup.outcome(SAVE, 1).refused == {1: "in flight"}
    assert setup.migrator.queued_bytes(*SAVE) == 2 * BLOCK_BYTES
    go_on.set()
    assert done.result(LIMIT_S) == future.result()
    assert setup.migrator.queued_bytes(*SAVE) == 0
    assert sorted(setup.host.keys()) == [1, 2] and len(setup.disk) == 0
    assert setup.outcome(SAVE, 1).moved == (1,)


def test_a_plan_that_waits_too_long_is_refused_and_done(setup: Setup):
    """Behind one that hangs: no worker has ever touched it, so it is done when it is late."""
    put(setup.host, 1)
    put(setup.host, 2)
    arrived, go_on = setup.disk.hang("prepare")
    first = setup.move(SAVE, 1)
    assert arrived.wait(LIMIT_S)
    done: Future[MigrationResult] = Future()
    second = setup.move(SAVE, 2, deadline_s=0.01, on_done=done.set_result)
    assert second.result(LIMIT_S) == done.result(LIMIT_S) == MigrationResult((), {2: "deadline"})
    go_on.set()
    assert first.result(LIMIT_S).moved == (1,)
    assert setup.host.keys() == [2]


def test_what_was_moved_before_the_end_stays_moved(setup: Setup):
    put(setup.host, 1)
    put(setup.host, 2)
    first_is_there, go_on = threading.Event(), threading.Event()
    commit = setup.disk.store.commit

    def commit_slowly(key: int) -> None:
        if key == 2:
            first_is_there.set()
            assert go_on.wait(LIMIT_S)
        commit(key)

    setup.disk.store.commit = commit_slowly
    done: Future[MigrationResult] = Future()
    future = setup.move(SAVE, 1, 2, on_done=done.set_result)
    assert first_is_there.wait(LIMIT_S) and future.cancel()
    go_on.set()
    assert done.result(LIMIT_S) == MigrationResult((1,), {2: "cancelled"})
    assert setup.host.keys() == [2] and setup.disk.keys() == [1]


def test_a_deadline_that_has_passed_touches_no_store(setup: Setup):
    put(setup.host, 1)
    setup.host.events.clear()
    assert setup.outcome(SAVE, 1, deadline_s=0.0).refused == {1: "deadline"}
    assert setup.host.events == [] == setup.disk.events


def test_cancelling_while_it_waits_and_while_it_runs(setup: Setup):
    put(setup.host, 1)
    put(setup.host, 2)
    arrived, go_on = setup.disk.hang("prepare")
    done: Future[MigrationResult] = Future()
    running = setup.move(SAVE, 1, on_done=done.set_result)
    assert arrived.wait(LIMIT_S)
    waiting = setup.move(SAVE, 2)
    assert waiting.cancel() and running.cancel() and not done.done()
    for future in (waiting, running):
        with pytest.raises(CancelledError):
            future.result(LIMIT_S)
    go_on.set()
    assert done.result(LIMIT_S) == MigrationResult((), {1: "cancelled"})
    setup.migrator.close()
    assert sorted(setup.host.keys()) == [1, 2] and len(setup.disk) == 0
    assert setup.counts() == {"cpu>nvme cancelled": 2}


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


def test_close_leaves_nothing_prepared(setup: Setup):
    for key in range(3):
        put(setup.host, key)
    arrived, go_on = setup.disk.hang("prepare")
    futures = [setup.move(SAVE, 0, 1), setup.move(SAVE, 2)]
    assert arrived.wait(LIMIT_S)
    with pytest.raises(TierError, match="1 moves hang in a store"):
        setup.migrator.close(timeout_s=0.0)
    go_on.set()
    setup.migrator.close()
    assert [future.result(LIMIT_S).refused for future in futures] == [{0: "closed", 1: "closed"}, {2: "closed"}]
    assert setup.disk.used_bytes() == 0 and sorted(setup.host.keys()) == [0, 1, 2]
    assert setup.outcome(SAVE, 1).refused == {1: "closed"}


def test_bandwidth_is_measured(setup: Setup):
    assert setup.migrator.bandwidth(*SAVE) is None
    for key in range(3):
        put(setup.host, key)
    setup.outcome(SAVE, 0, 1, 2, 9)
    samples = setup.migrator.samples(*SAVE)
    assert sum(size for size, _ in samples) == 3 * BLOCK_BYTES and all(seconds > 0 for _, seconds in samples)
    assert setup.migrator.bandwidth(*SAVE) == pytest.approx(3 * BLOCK_BYTES / sum(seconds for _, seconds in samples))
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


def test_a_callback_that_raises_does_no_harm(setup: Setup, caplog: pytest.LogCaptureFixture):
    put(setup.host, 1)
    setup.outcome(SAVE, 1, on_done=lambda result: 1 // 0)
    assert setup.outcome(LOAD, 1).moved == (1,)
    assert "on_done of a migration raised" in caplog.text


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
    """Whatever the order of things: every future ends, every block is somewhere, and nothing is left prepared."""
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

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    setup.migrator.close()
    assert sorted({*setup.host.keys(), *setup.disk.keys()}) == [0, 1, 2, 3]
    setup.check()
    setup.disk.close()


def test_who_waits_for_files_does_not_make_the_move(setup: Setup):
    put(setup.host, 1)
    told: list[threading.Thread] = []
    future = setup.move(SAVE, 1, on_done=lambda result: told.append(threading.current_thread()))
    assert future.result().moved == (1,)
    setup.migrator.close()
    assert told != [threading.current_thread()]


def test_a_source_whose_reading_fails_as_a_whole_leaves_no_room_taken(setup: Setup):
    def fail(*args: object) -> list:
        raise RuntimeError("no")

    put(setup.host, 1)
    put(setup.host, 2)
    setup.host.read_each = fail
    assert setup.outcome(SAVE, 1, 2).refused == {1: "failed: RuntimeError('no')", 2: "failed: RuntimeError('no')"}
    assert sorted(setup.host.keys()) == [1, 2]
