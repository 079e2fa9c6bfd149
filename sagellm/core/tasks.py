"""How an event loop ends without leaving tasks behind."""

import asyncio
import logging

logger = logging.getLogger("sagellm")

CANCELLED_S = 5.0  # a task that goes on for so long after it was cancelled is left alone

__all__ = ["end_tasks"]


async def end_tasks(grace_s: float = 0.0) -> None:
    """End every other task of this loop: within `grace_s` seconds each may end by itself, then it is cancelled.

    A loop that only stops drops tasks in the middle of what they do, even such as have been cancelled a moment ago; Python
    destroys them later, in whatever runs then. What was handed over from other threads before the call counts as well.
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
