"""Tensor-parallel workers of the CPU device as forks of one process that has loaded the libraries.

A spawned worker loads them for three seconds of a core, and each worker loads them again. The fork server of
`multiprocessing` loads them once, while the engine's process still loads its own.
"""

import gc
import os
import random
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import current_process, forkserver, parent_process
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

__all__ = ["context", "end_early", "expecting_workers", "follow_parent", "load_early", "load_if_expected"]

LIBRARIES = "sagellm.engines.lmdeploy.worker_libraries"
EXPECTED = "SAGELLM_WORKERS_EXPECTED"  # in the environment of an engine process that will have workers: a folder
_is_ours = _is_kept = False


class _Worker(ForkServerProcess):
    """A fork that has the environment of the process that asks for it, and ends with that process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        follow_parent()
        random.seed()  # else that of all forks is the same
        gc.enable()
        super().run()


class _WorkerContext(ForkServerContext):
    Process = _Worker


def load_early(keep: bool = False) -> bool:
    """Start the process that the workers are forked from. It loads libraries meanwhile. A second call starts none.

    Args:
        keep: it outlives the engines of this program, so that later ones need not load the libraries either.

    Returns:
        False if this program has a fork server of its own, which is left alone.
    """
    global _is_ours, _is_kept
    _is_kept = _is_kept or keep
    if not _is_ours and forkserver._forkserver._forkserver_pid is not None:
        return False
    _is_ours = True
    # A process that has just been spawned may start none, for the sake of programs that do so where they are imported.
    arriving = vars(current_process()).pop("_inheriting", None)
    try:
        forkserver.set_forkserver_preload([LIBRARIES])
        forkserver.ensure_running()
    finally:
        if arriving is not None:
            current_process()._inheriting = arriving
    return True


def end_early() -> None:
    """End the process that workers are forked from, unless it is kept. All of them have ended."""
    global _is_ours
    if _is_ours and not _is_kept:
        forkserver._forkserver._stop()
        _is_ours = False


@contextmanager
def expecting_workers(are_expected: bool, folder: Path) -> Iterator[None]:
    """Say in the environment of processes that are spawned inside whether to call `load_if_expected` for workers.

    Args:
        folder: for a socket of the process that workers are forked from; somebody else removes it.
    """
    if are_expected:
        os.environ[EXPECTED] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(EXPECTED, None)


def load_if_expected() -> None:
    """Call `load_early` if this engine process will have workers."""
    folder = os.environ.pop(EXPECTED, None)
    if folder is not None:
        current_process()._config["tempdir"] = folder
        load_early()


def context(spawning: BaseContext) -> BaseContext:
    """Return what starts the workers of an executor: forks on the CPU device, what LMDeploy uses elsewhere."""
    from lmdeploy import sage_device

    return _WorkerContext() if sage_device.active is not None and load_early() else spawning


def ignore_failures_of_workers() -> None:
    """LMDeploy's worker that fails sends a signal to its parent, which is the fork server here. `WorkerWatch` sees its end."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def follow_parent() -> None:
    """Have this process, a child by `multiprocessing`, ended as soon as its parent has."""
    threading.Thread(target=_follow, name="sagellm-follow", daemon=True).start()


def _follow() -> None:
    # Not the kernel's signal for this: it comes when the thread ends that started us, and not when that was before us.
    # Nor the pipe that `multiprocessing` watches: a process that was forked meanwhile may hold its other end.
    with suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(parent_process().pid)], [], [])
    os._exit(1)
