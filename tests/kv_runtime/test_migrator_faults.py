"""Moves that fail, are late or are given up: refused one by one, and nothing is left behind."""

import threading
from concurrent.futures import CancelledError, Future

import pytest

from sagellm.core.errors import TierError
from sagellm.core.hooks import MigrationPlan, MigrationResult
from sagellm.kv_runtime.base import StoreFullError
from tests.kv_runtime.faulty_store import LIMIT_S
from tests.kv_runtime.migration_setup import LOAD, SAVE, Setup, late
from tests.kv_runtime.store_contract import BLOCK_BYTES, NUM_BLOCKS, put


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


def test_a_callback_that_raises_does_no_harm(setup: Setup, caplog: pytest.LogCaptureFixture):
    put(setup.host, 1)
    setup.outcome(SAVE, 1, on_done=lambda result: 1 // 0)
    assert setup.outcome(LOAD, 1).moved == (1,)
    assert "on_done of a migration raised" in caplog.text
