"""Processes that end when the one that started them is gone, and the engine's process as a fork of the server.

A server that is killed, or that a library crashes, ends no child of its own; the engine and its workers would keep their
memory, and their GPU, for ever.
"""

import atexit
import copy
import ctypes
import gc
import multiprocessing
import os
import random
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import popen_fork, resource_tracker, util
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, NoReturn

from sagellm.core.early import ENGINE_NAME, end, skip_teardown
from sagellm.core.host import ENGINE_PROCESS
from sagellm.engines.lmdeploy.libraries import load_lmdeploy, only_engine
from sagellm.engines.lmdeploy.worker_processes import follow_parent, load_if_expected

_PR_SET_NAME = 15  # of Linux's prctl


class FollowingProcess(SpawnProcess):
    """A process that follows its parent, as do the processes that it spawns itself.

    Unpickling the target of a spawned process loads the libraries, which `loading_libraries` makes quicker.

    Attributes:
        keeps: file descriptors that the process has besides the standard ones, which makes it a fork of this one. None: it is
            spawned.
    """

    keeps: tuple[int, ...] | None = None

    @staticmethod
    def _Popen(process: Any) -> popen_fork.Popen:
        return SpawnProcess._Popen(process) if process.keeps is None else _Fork(process)

    def start(self) -> None:
        if self._popen is None:  # LMDeploy starts an engine that runs already
            super().start()

    def __reduce__(self) -> tuple[Any, ...]:
        # The state comes after the call.
        return _arrive, (type(self), self.name == ENGINE_PROCESS), self.__dict__

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


class _Fork(popen_fork.Popen):
    """Starts a process with all that this one has loaded.

    Start it before libraries have threads here: locks that they hold are never released in a fork. The process ignores Ctrl-C.
    Like a spawned one it has no open files but those that it keeps.
    """

    def _launch(self, process: FollowingProcess) -> None:
        resource_tracker.ensure_running()  # one for both
        reader, writer = os.pipe()
        self.sentinel, end_of_fork = os.pipe()  # readable once the fork has ended
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, where threads of ours wait for signals
            self.pid = os.fork()
        if self.pid == 0:
            _become(process, reader, kept=(*process.keeps, reader, end_of_fork, resource_tracker.getfd()))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)
        os.close(end_of_fork)
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, writer))


def _become(process: FollowingProcess, reader: int, kept: tuple[int, ...]) -> NoReturn:
    """Run a process in the fork that was made for it.

    Args:
        reader: file descriptor of a pipe whose other end the parent has.
        kept: file descriptors that stay open, besides the standard ones.
    """
    code = 1
    try:
        borders = sorted({2, *kept})
        for before, after in zip(borders, [*borders[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(before + 1, after)
        atexit._clear()  # those of the server
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        load_if_expected()
        _follow_environment()
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


def _arrive(kind: type[FollowingProcess], is_engine: bool) -> FollowingProcess:
    gc.disable()
    load_if_expected()  # while this process loads its own
    if is_engine:
        load_lmdeploy()
    return kind.__new__(kind)


def _keep_libraries() -> None:
    gc.freeze()
    gc.enable()


class _Port:
    """Tells the server the port of its engine process, through a pipe. It is LMDeploy's dict and condition in one."""

    def __init__(self) -> None:
        self._reader, self.writer = multiprocessing.get_context("spawn").Pipe(duplex=False)

    def __enter__(self) -> "_Port":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __setitem__(self, name: str, port: int) -> None:
        self.writer.send(port)

    def notify(self) -> None:
        pass  # the port has woken the server

    def __contains__(self, name: str) -> bool:
        return True  # to ask for it waits for it

    def __getitem__(self, name: str) -> int:
        """Wait for the port. `EngineWatch` ends a server whose engine process ends before."""
        return self._reader.recv()


class EngineProcess:
    """The part of `torch.multiprocessing` that LMDeploy starts its engine process with.

    LMDeploy starts it once the server has loaded its libraries and the tokenizer. `start` starts it before. Processes that it
    spawns follow this one. LMDeploy's manager would be a third process, and its early end once made the engine process die.

    Args:
        on_start: is called with the process before it starts, where LMDeploy starts it, and after `start`.
    """

    def __init__(self, on_start: Callable[[FollowingProcess], None]) -> None:
        self._on_start = on_start
        self._port = _Port()
        self._process: FollowingProcess | None = None
        self._settings: dict[str, Any] = {}

    def start(self, is_fork: bool, **settings: Any) -> None:
        """Start the engine process before LMDeploy does.

        Args:
            is_fork: see `_Fork`; else it is spawned.
            settings: what LMDeploy will give to the process.
        """
        # LMDeploy changes the configuration once more, and both processes go on at the same time.
        self._settings = {name: copy.copy(value) for name, value in settings.items()}
        self._process = FollowingProcess(target=_run_engine, args=(self._port,), kwargs=self._settings, name=ENGINE_PROCESS)
        self._process.keeps = (self._port.writer.fileno(),) if is_fork else None
        self._process.start()
        self._on_start(self._process)

    # ---- called by LMDeploy

    def Manager(self) -> AbstractContextManager["EngineProcess"]:
        return nullcontext(self)

    def dict(self) -> _Port:
        return self._port

    Condition = dict

    def get_context(self, method: str) -> "EngineProcess":
        if method != "spawn":
            raise ValueError(f"context {method!r}; LMDeploy starts its engine with 'spawn'.")
        return self

    def Process(self, **options: Any) -> FollowingProcess:
        if self._process is None:
            self._process = FollowingProcess(**options)
            self._on_start(self._process)
        else:
            assert options["kwargs"] == self._settings, "LMDeploy asks for another engine than the one that was started"
        return self._process


def _run_engine(port: _Port, **settings: Any) -> None:
    with loading_libraries():
        from lmdeploy.pytorch.engine.mp_engine.zmq_engine import ZMQMPEngine
    only_engine()
    ZMQMPEngine._mp_proc(port, port, **settings)
