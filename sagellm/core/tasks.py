"""Tasks of an event loop: a limit to their waits, and an end that leaves no task."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")

logger = logging.getLogger("sagellm")

CANCELLED_S = 5.0  # a task that goes on for so long after it was cancelled is left alone

__all__ = ["end_tasks", "within"]


async def within(work: Awaitable[Result], limit_s: float) -> Result:
    """The result of `work`, which is cancelled where it takes longer.

    As `asyncio.wait_for`, but that drops the cancellation of the task that waits, where the result comes in the same moment
    (before Python 3.12): a task that waits in a loop then never ends.

    Raises:
        asyncio.TimeoutError: not done within `limit_s` seconds.
    """
    future = asyncio.ensure_future(work)
    try:
        await asyncio.wait({future}, timeout=limit_s)
        if future.done():
            return future.result()
    finally:
        if future.cancel():
            await asyncio.wait({future})
            if not future.cancelled():
                future.exception()  # else asyncio would log an exception that was never retrieved
    raise asyncio.TimeoutError


async def end_tasks(grace_s: float = 0.0) -> None:
    """End every other task of this loop: within `grace_s` seconds each may end by itself, then it is cancelled.

    A loop that only stops drops tasks in the middle of what they do, even such as have been cancelled a moment ago; Python
    destroys them later, in whatever runs then. Work that other threads handed over before the call counts as well.
    """
    await asyncio.sleep(0)  # such a coroutine becomes a task only now
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left and grace_s > 0:
        _, left = await asyncio.wait(left, timeout=grace_s)
    for task in left:
        task.cancel()
    if left:
        _, left = await asyncio.wait(left, timeout=CANCELLED_S)
    for task in left:
        logger.warning("%r does not end, though it was cancelled %g seconds ago", task, CANCELLED_S)
