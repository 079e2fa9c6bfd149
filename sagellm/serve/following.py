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
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, NoReturn

from sagellm.core.early import end, skip_teardown
from sagellm.engines.lmdeploy.worker_processes import load_if_expected

POLL_S = 0.5


class FollowingProcess(SpawnProcess):
    """A spawned process that follows its parent, as do the processes that it spawns itself.

    Unpickling its target loads the libraries, which `loading_libraries` makes quicker.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (type(self),), self.__dict__  # the state comes after the call

    def _bootstrap(self, *args: Any, **options: Any) -> NoReturn:
        code = super()._bootstrap(*args, **options)
        skip_teardown()
        end(code)

    def run(self) -> None:
        _keep_libraries()
        follow_parent()
        SpawnContext.Process = FollowingProcess  # of the workers that LMDeploy spawns here, on the context by name
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
    load_if_expected()  # while this process loads its own
    return kind.__new__(kind)


def _keep_libraries() -> None:
    gc.freeze()
    gc.enable()


def follow_parent() -> None:
    """Have this process, a child by `multiprocessing`, killed soon after its parent has ended."""
    threading.Thread(target=_follow, name="sagellm-follow", daemon=True).start()


class _Lasting:
    """A started manager whose `with` block does not end it."""

    def __init__(self, manager: SyncManager) -> None:
        self._manager = manager

    def __enter__(self) -> SyncManager:
        return self._manager

    def __exit__(self, *_: object) -> None:
        pass


class _FollowingContext(SpawnContext):
    Process = FollowingProcess


class EngineProcesses:
    """The part of `torch.multiprocessing` that starts LMDeploy's engine process, with two differences.

    Processes that it spawns follow this one. Its managers live until `end_managers`: the engine process announces itself
    through a manager, which LMDeploy ends as soon as it has read the announcement. Once in some twenty starts the engine
    process was then still waiting for the answer to its last call, and died of it.

    Args:
        run_dir: of the managers' sockets; a manager that is killed leaves its folder behind.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._managers: list[SyncManager] = []

    def Manager(self) -> _Lasting:
        self._managers.append(SyncManager(str(self._run_dir / f"manager{len(self._managers)}")))
        self._managers[-1].start(follow_parent)
        return _Lasting(self._managers[-1])

    def get_context(self, method: str) -> BaseContext:
        """Return a context whose processes follow this one; only `spawn` is known."""
        if method != "spawn":
            raise ValueError(f"context {method!r}; LMDeploy starts its engine with 'spawn'.")
        return _FollowingContext()

    def end_managers(self) -> None:
        while self._managers:
            self._managers.pop().shutdown()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    # Not the kernel's signal for this: it comes when the thread ends that started us, and not when that was before us.
    # Nor the pipe that `multiprocessing` watches: a process that was forked meanwhile may hold its other end.
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(POLL_S)
    os._exit(1)
