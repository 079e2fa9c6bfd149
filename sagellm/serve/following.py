"""Processes that end when the one that started them is gone, and the engine's process as a fork of the server.

A server that is killed, or that a library crashes, ends no child of its own; the engine and its workers would keep their
memory, and their GPU, for ever.
"""

import atexit
import ctypes
import gc
import io
import multiprocessing
import os
import pickle
import random
import select
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import popen_fork, resource_tracker, util
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess, reduction, set_spawning_popen
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from sagellm.core.early import ENGINE_NAME, end, skip_teardown
from sagellm.core.host import ENGINE_PROCESS
from sagellm.engines.lmdeploy.worker_processes import load_if_expected

POLL_S = 0.5
_PR_SET_NAME = 15  # of Linux's prctl


class FollowingProcess(SpawnProcess):
    """A process that follows its parent, as do the processes that it spawns itself.

    It is `fork` if there is one, else spawned. Unpickling the target of a spawned process loads the libraries, which
    `loading_libraries` makes quicker.
    """

    fork: ClassVar["WaitingFork | None"] = None

    @staticmethod
    def _Popen(process: Any) -> popen_fork.Popen:
        fork, FollowingProcess.fork = FollowingProcess.fork, None
        if fork is not None and fork.becomes(process):
            return fork
        return SpawnProcess._Popen(process)

    @classmethod
    def dismiss_fork(cls) -> None:
        """End a fork that became no process."""
        fork, cls.fork = cls.fork, None
        if fork is not None:
            fork.dismiss()

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (type(self),), self.__dict__  # the state comes after the call

    def _bootstrap(self, *args: Any, **options: Any) -> NoReturn:
        code = super()._bootstrap(*args, **options)
        skip_teardown()
        end(code)

    def run(self) -> None:
        _keep_libraries()
        if self.name == ENGINE_PROCESS:
            _take_name(ENGINE_NAME)
        follow_parent()
        SpawnContext.Process = FollowingProcess  # of the workers that LMDeploy spawns here, on the context by name
        super().run()


class WaitingFork(popen_fork.Popen):
    """A fork of this process that becomes the next `FollowingProcess`, with all that this process has loaded.

    Make it before this process starts threads: locks that they hold are never released in a fork. The fork ignores Ctrl-C
    and ends with this process. Like a spawned process it has no open files but the standard ones.
    """

    def __init__(self) -> None:
        self.returncode: int | None = None
        resource_tracker.ensure_running()  # one for both
        util._flush_std_streams()
        reader, self._writer = os.pipe()
        self.sentinel, end_of_fork = os.pipe()  # readable once the fork has ended
        parent = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, where threads of ours wait for signals
            self.pid = os.fork()
        if self.pid == 0:
            _wait_and_become(parent, reader, kept=(reader, end_of_fork, resource_tracker.getfd()))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)
        os.close(end_of_fork)
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, self._writer))

    def becomes(self, process: FollowingProcess) -> bool:
        """Have the fork run a process, in the environment of now. Returns False if the fork was killed."""
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(dict(os.environ), message)
            reduction.dump(process, message)
        finally:
            set_spawning_popen(None)
        with suppress(BrokenPipeError), open(self._writer, "wb", closefd=False) as pipe:
            pipe.write(message.getbuffer())
            return True
        self.dismiss()
        return False

    def dismiss(self) -> None:
        """End a fork that becomes no process."""
        self.close()
        self.wait()

    def duplicate_for_child(self, fd: int) -> int:
        raise ValueError(f"a waiting fork cannot be sent file descriptor {fd}; it has those of before it was made.")


def _wait_and_become(parent: int, reader: int, kept: tuple[int, ...]) -> NoReturn:
    """Wait in a fork for what `WaitingFork.becomes` sends, and run it.

    Args:
        parent: process whose end is the fork's; asked for here, it could have ended already.
        reader: file descriptor of the pipe that it is sent through.
        kept: file descriptors that stay open, besides the standard ones.
    """
    code = 1
    try:
        borders = sorted({2, *kept})
        for before, after in zip(borders, [*borders[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(before + 1, after)
        FollowingProcess.fork = None
        atexit._clear()  # those of the server
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        while not select.select([reader], [], [], POLL_S)[0]:
            if os.getppid() != parent:
                os._exit(1)
        with open(reader, "rb", closefd=False) as pipe:
            if not pipe.peek(1):
                os._exit(0)  # dismissed
            environment = pickle.load(pipe)
            os.environ.clear()
            os.environ.update(environment)
            _follow_environment()
            process = pickle.load(pipe)
        code = process._bootstrap(parent_sentinel=reader)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def _follow_environment() -> None:
    """Do what a library does when it is loaded in this environment."""
    import torch

    random.seed()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def _take_name(name: str) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


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
    def __init__(self, on_engine: Callable[[FollowingProcess], None]) -> None:
        self._on_engine = on_engine

    def Process(self, *args: Any, **options: Any) -> FollowingProcess:
        process = FollowingProcess(*args, **options)
        if process.name == ENGINE_PROCESS:
            self._on_engine(process)
        return process


class EngineProcesses:
    """The part of `torch.multiprocessing` that starts LMDeploy's engine process, with two differences.

    Processes that it spawns follow this one. Its managers live until `end_managers`: the engine process announces itself
    through a manager, which LMDeploy ends as soon as it has read the announcement. Once in some twenty starts the engine
    process was then still waiting for the answer to its last call, and died of it.

    Args:
        run_dir: of the managers' sockets; a manager that is killed leaves its folder behind.
        on_engine: is called with the engine's process before it starts.
    """

    def __init__(self, run_dir: Path, on_engine: Callable[[FollowingProcess], None]) -> None:
        self._run_dir, self._on_engine = run_dir, on_engine
        self._managers: list[SyncManager] = []

    def Manager(self) -> _Lasting:
        self._managers.append(SyncManager(str(self._run_dir / f"manager{len(self._managers)}")))
        self._managers[-1].start(follow_parent)
        return _Lasting(self._managers[-1])

    def get_context(self, method: str) -> BaseContext:
        """Return a context whose processes follow this one; only `spawn` is known."""
        if method != "spawn":
            raise ValueError(f"context {method!r}; LMDeploy starts its engine with 'spawn'.")
        return _FollowingContext(self._on_engine)

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
