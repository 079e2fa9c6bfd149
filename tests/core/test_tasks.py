"""Loops end without tasks that hang in the air."""

import asyncio
import logging

from sagellm.core import tasks
from sagellm.core.tasks import end_tasks


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
