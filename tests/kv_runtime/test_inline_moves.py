"""Moves of a few bytes between stores in memory, which whoever asks makes himself."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest

from sagellm.core.hooks import MigrationPlan, MigrationResult, Tier
from sagellm.kv_runtime import migrator as module
from sagellm.kv_runtime.host_store import HostStore
from sagellm.kv_runtime.migrator import KVMigrator
from sagellm.kv_runtime.pool import KVPool
from tests.kv_runtime.faulty_store import LIMIT_S, FaultyStore
from tests.kv_runtime.migration_setup import LOAD, SAVE, Setup
from tests.kv_runtime.store_contract import BLOCK_BYTES, NUM_BLOCKS, content, put


class Between:
    """Two host stores, of which the second one may fail, with three blocks in the first, and a migrator between them."""

    def __init__(self) -> None:
        self.source = HostStore(KVPool(NUM_BLOCKS, BLOCK_BYTES))
        self.target = FaultyStore(HostStore(KVPool(NUM_BLOCKS, BLOCK_BYTES, Tier.NVME)))
        self.migrator = KVMigrator([self.source, self.target], num_threads=1)
        for key in (1, 2, 3):
            put(self.source, key)

    def move(self, *keys: int, tiers: tuple[Tier, Tier] = SAVE, **options: Any) -> Future[MigrationResult]:
        return self.migrator.migrate(MigrationPlan(*tiers, keys), **options)


@pytest.fixture
def between() -> Iterator[Between]:
    between = Between()
    yield between
    between.migrator.close()
    for store in (between.source, between.target):
        assert store.used_bytes() == len(store) * BLOCK_BYTES
        assert all(np.array_equal(store.read(key), content(key)) for key in list(store.keys()))


def test_a_few_bytes_have_moved_when_the_call_returns(between: Between):
    told: list[tuple[MigrationResult, threading.Thread]] = []
    future = between.move(2, 9, 3, on_done=lambda result: told.append((result, threading.current_thread())))
    assert future.done() and future.result() == MigrationResult((2, 3), {9: "missing"})
    assert told == [(future.result(), threading.current_thread())]
    assert sorted(between.target.keys()) == [2, 3] and between.source.keys() == [1]
    assert between.move(3, tiers=LOAD).done() and between.migrator.queued_bytes(*LOAD) == 0
    assert between.migrator.bandwidth(*SAVE) > 0


def test_more_than_a_few_bytes_are_left_to_a_thread(between: Between, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "INLINE_BYTES", 2 * BLOCK_BYTES)
    told: list[threading.Thread] = []
    for keys in ((1, 2, 3), (1, 2)):
        tiers = SAVE if len(keys) == 3 else LOAD
        future = between.move(*keys, tiers=tiers, on_done=lambda result: told.append(threading.current_thread()))
        assert future.result(LIMIT_S).moved == keys
    between.migrator.close()
    assert told[0] is not threading.current_thread() and told[1] is threading.current_thread()


def test_what_queues_for_the_thread_is_not_waited_for(between: Between, monkeypatch: pytest.MonkeyPatch):
    arrived, go_on = between.target.hang("prepare")
    with monkeypatch.context() as patch:
        patch.setattr(module, "INLINE_BYTES", 0)
        busy = between.move(1)
    assert arrived.wait(LIMIT_S)
    between.target.let_pass("prepare")
    assert between.move(2).done() and not busy.done()
    assert between.move(1).result().refused == {1: "in flight"}
    go_on.set()
    assert busy.result(LIMIT_S).moved == (1,)


def test_too_late_or_failed_means_refused(between: Between):
    assert between.move(1, deadline_s=0.0).result().refused == {1: "deadline"}
    between.target.fail["commit"] = RuntimeError("no")
    between.target.fail["abort"] = RuntimeError("nor this")
    assert between.move(2).result().refused == {2: "failed: RuntimeError('no')"}
    between.target.fail.clear()
    between.target.abort(2)
    assert between.move(2).result().moved == (2,)


def test_close_waits_for_a_caller_in_the_middle_of_a_move(between: Between):
    arrived, go_on = between.target.hang("commit")
    with ThreadPoolExecutor(2) as pool:
        moving = pool.submit(between.move, 2)
        assert arrived.wait(LIMIT_S)
        closing = pool.submit(between.migrator.close, LIMIT_S)
        assert not wait([closing], 0.05).done, "the move is in a store still"
        go_on.set()
        closing.result(LIMIT_S)
        assert moving.result(LIMIT_S).result().refused == {2: "closed"}
    assert 2 in between.source and 2 not in between.target
    assert between.move(3).result().refused == {3: "closed"}


def test_moves_to_files_are_left_to_a_thread(setup: Setup):
    put(setup.host, 1)
    told: list[threading.Thread] = []
    future = setup.move(SAVE, 1, on_done=lambda result: told.append(threading.current_thread()))
    assert future.result().moved == (1,)
    setup.migrator.close()
    assert told != [threading.current_thread()]
