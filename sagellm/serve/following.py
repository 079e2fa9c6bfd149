"""Processes that end when the one that started them is gone.

A server that is killed, or that a library crashes, ends no child of its own; the engine and its workers would keep their
memory, and their GPU, for ever.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from unittest import mock

POLL_S = 0.5


class FollowingProcess(SpawnProcess):
    """A spawned process that follows its parent, as do the processes that it spawns itself."""

    def run(self) -> None:
        follow_parent()
        SpawnContext.Process = FollowingProcess
        super().run()


def follow_parent() -> None:
    """Have this process, a child by `multiprocessing`, killed soon after its parent has ended."""
    threading.Thread(target=_follow, name="sagellm-follow", daemon=True).start()


@contextmanager
def following() -> Iterator[None]:
    """Within the block everything that is spawned follows this process."""
    with mock.patch.object(SpawnContext, "Process", FollowingProcess):
        yield


def _follow() -> None:
    parent = multiprocessing.parent_process()
    # Not the kernel's signal for this: it comes when the thread ends that started us, and not when that was before us.
    # Nor the pipe that `multiprocessing` watches: a process that was forked meanwhile may hold its other end.
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(POLL_S)
    os._exit(1)
