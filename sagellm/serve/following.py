"""Processes that end when the one that started them is gone.

A server that is killed, or that a library crashes, ends no child of its own; the engine and its workers would keep their
memory, and their GPU, for ever.
"""

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any
from unittest import mock

POLL_S = 0.5


class FollowingProcess(SpawnProcess):
    """A spawned process that follows its parent, as do the processes that it spawns itself.

    What it is to run loads the libraries while it is unpickled, which `loading_libraries` makes quicker.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (type(self),), self.__dict__  # the state comes after the call

    def run(self) -> None:
        _keep_libraries()
        follow_parent()
        SpawnContext.Process = FollowingProcess
        super().run()


@contextmanager
def loading_libraries() -> Iterator[None]:
    """No search for garbage while libraries are loaded: it would find none, in a sixth of the time; nor later among them."""
    gc.disable()
    try:
        yield
    finally:
        _keep_libraries()


def _arrive(kind: type[FollowingProcess]) -> FollowingProcess:
    gc.disable()
    return kind.__new__(kind)


def _keep_libraries() -> None:
    gc.freeze()
    gc.enable()


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
