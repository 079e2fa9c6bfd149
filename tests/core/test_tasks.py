"""Waits have a limit; loops end without tasks that hang in the air."""

import asyncio
import gc
import logging

import pytest

from sagellm.core import tasks
from sagellm.core.tasks import end_tasks, within


def test_tasks_end():
    ended = []

    async def wait(name, seconds):
        try:
            await asyncio.sleep(seconds)
            ended.append(f"{name} by itself")
        finally:
            ended.append(name)

    async def run():
        loop = asyncio.get_running_loop()
        soon, late = asyncio.create_task(wait("soon", 0.01)), asyncio.create_task(wait("late", 1000))
        await asyncio.sleep(0)
        cancelled = asyncio.create_task(wait("cancelled", 1000))
        await asyncio.sleep(0)
        cancelled.cancel()
        handed_over = asyncio.run_coroutine_threadsafe(wait("handed over", 1000), loop)
        await end_tasks(grace_s=0.2)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert late.cancelled() and handed_over.cancelled() and not soon.cancelled()

    asyncio.run(run())
    assert ended[:3] == ["cancelled", "soon by itself", "soon"] and set(ended[3:]) == {"late", "handed over"}


def test_no_grace_and_nothing_to_end():
    async def run():
        await end_tasks()
        task = asyncio.create_task(asyncio.sleep(0.05))
        await end_tasks()
        assert task.cancelled()

    asyncio.run(run())


def test_a_task_that_does_not_end(monkeypatch, caplog):
    monkeypatch.setattr(tasks, "CANCELLED_S", 0.05)
    over = asyncio.Event()

    async def stubborn():
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                continue

    async def run():
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        await end_tasks()
        assert not task.done()
        over.set()
        await task

    with caplog.at_level(logging.WARNING, "sagellm"):
        asyncio.run(run())
    assert "stubborn" in caplog.text and "does not end" in caplog.text


async def _after(seconds, what, ended=None):
    try:
        await asyncio.sleep(seconds)
        if isinstance(what, Exception):
            raise what
        return what
    finally:
        if ended is not None:
            ended.append(what)


def test_work_within_a_limit():
    async def run():
        assert await within(_after(0.01, 7), 10) == 7
        done = asyncio.get_running_loop().create_future()
        done.set_result(8)
        assert await within(done, 0) == 8
        with pytest.raises(KeyError):
            await within(_after(0, KeyError()), 10)
        ended = []
        with pytest.raises(asyncio.TimeoutError):
            await within(_after(1000, 9, ended), 0.01)
        assert ended == [9]  # it has heard of it, and is over

    asyncio.run(run())


@pytest.mark.parametrize("num_turns", range(4))
def test_a_cancellation_in_the_moment_of_the_result(num_turns):
    """It counts, however many turns of the loop the two are apart."""

    async def run():
        has_come, rounds = asyncio.Event(), []

        async def waiting():
            while True:
                await within(has_come.wait(), 10)
                has_come.clear()
                rounds.append(1)

        task = asyncio.create_task(waiting())
        await asyncio.sleep(0.01)
        has_come.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled()
        return len(rounds)

    assert asyncio.run(run()) <= 1


def test_work_that_fails_while_it_is_cancelled(caplog):
    async def failing():
        try:
            await asyncio.sleep(1000)
        finally:
            raise KeyError

    async def run():
        with pytest.raises(asyncio.TimeoutError):
            await within(failing(), 0.01)
        task = asyncio.create_task(within(failing(), 1000))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(run())
    gc.collect()
    assert not caplog.records
