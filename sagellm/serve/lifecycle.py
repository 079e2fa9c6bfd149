"""Signals and child processes of the server.

The engine runs in a process of its own. Ctrl-C in a terminal reaches the whole group; the engine must not see it, or the
requests that are to be finished die with it. So SIGINT is blocked while the children are started, which they inherit,
and a thread of ours takes it during that time.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from sagellm.core.early import STOP_SIGNALS
from sagellm.core.host import ENGINE_ENDED, START_REFUSED

POLL_S = 0.2
END_S = 10.0  # for an orderly end without an engine; a handler may be waiting for an answer of it, without a limit


class Loading:
    """The time from the start to readiness: a stop signal ends the process and its children at once, with code 0.

    `clean_up` is called last, whatever the main thread is doing.
    """

    def __init__(self, clean_up: Callable[[], None]) -> None:
        self._over = self._stops = False
        self._clean_up = clean_up
        # Its start unblocks SIGINT, so it must not come between the block and the start of the engine process.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # SIGINT too: a library's thread that is older than the block may take it.
        self._before = {number: signal.signal(number, lambda *_: self._stop()) for number in STOP_SIGNALS}
        threading.Thread(target=self._watch, name="sagellm-loading", daemon=True).start()

    def done(self) -> None:
        """From now on the server's own handlers decide; after them, a repeated signal is ignored."""
        self._over = True
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def cancel(self) -> None:
        """The end of a start that failed: signals do again what they did before. Changes nothing after `done`."""
        if self._over:
            return
        self._over = True
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def wait_for_stop(self) -> None:
        """Never return if a stop is on its way: what fails in the main thread then, fails because the children end."""
        while self._stops:
            time.sleep(POLL_S)

    def _watch(self) -> None:
        while not self._over:
            if signal.sigtimedwait({signal.SIGINT}, POLL_S) is not None:
                self._stop()

    def _stop(self) -> None:
        if not self._over:
            self._stops = True
            end_children()
            self._clean_up()
            os._exit(0)


class EngineWatch:
    """Notices when the engine ends by itself; LMDeploy would wait for its answer for ever.

    Args:
        run_dir: where an engine process says why it does not start or has ended.
        start_again: is called, and does not return, where a server that was ready does not end in order; None: it ends.

    Attributes:
        reason: why no request is worked on any more; empty before.
    """

    def __init__(
        self, clean_up: Callable[[], None], run_dir: Path | None = None, start_again: Callable[[], None] | None = None
    ) -> None:
        self.engine_died = False
        self._start_again = start_again
        self._clean_up = clean_up
        self._run_dir = run_dir
        self._stopped = threading.Event()
        self._finished = threading.Event()
        self._dead = threading.Event()
        self.reason = ""
        self._callback: Callable[[], None] | None = None
        self._engine: BaseProcess | None = None
        threading.Thread(target=self._run, name="sagellm-watch", daemon=True).start()

    def watch(self, engine: BaseProcess) -> None:
        """Watch the process of the engine, which is about to start."""
        self._engine = engine

    def on_death(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def report_dead_loop(self) -> None:
        """The process lives, but its loop has ended with an error: no request will be worked on."""
        self.reason = "the engine has stopped working"
        self._dead.set()

    def stop(self) -> None:
        """From here on the engine may end."""
        self._stopped.set()

    def finish(self) -> None:
        """Nothing is left that could wait for a dead engine."""
        self._stopped.set()
        self._finished.set()

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            engine = self._engine
            if engine is not None and engine.pid is not None and not engine.is_alive():
                self.reason = self._read(ENGINE_ENDED) or f"the engine process ended with code {engine.exitcode}"
                self._dead.set()
            if self._dead.is_set() and not self._stopped.is_set():
                self._end()
                return

    def _end(self) -> None:
        self.engine_died = True
        refusal = self._read(START_REFUSED)
        with contextlib.suppress(OSError):  # the reader of standard error may be gone; that must not keep us alive
            print(f"error: {refusal or f'{self.reason}; its log is above.'}", file=sys.stderr, flush=True)
        if self._callback is not None:
            self._callback()
            if self._finished.wait(END_S):
                return
        # Still loading, or stuck in a call to the engine: the main thread waits for what cannot come.
        end_children()
        self._clean_up()
        if self._callback is not None and self._start_again is not None:
            self._start_again()
        os._exit(2 if refusal else 1)

    def _read(self, name: str) -> str:
        """Return the text that the engine process has written to that file; empty if it has not."""
        try:
            return (self._run_dir / name).read_text() if self._run_dir is not None else ""
        except OSError:
            return ""


def end_children(grace_s: float = 5.0) -> None:
    """End every process below this one: asked first, then killed.

    Python's resource tracker is spared: it ignores the request, and ends by itself when this process does.
    """
    children = [child for child in psutil.Process().children(recursive=True) if not _is_tracker(child)]
    for child in children:
        _quietly(child.terminate)
    deadline = time.monotonic() + grace_s
    _, alive = psutil.wait_procs(children, timeout=max(0.0, deadline - time.monotonic()))
    for child in alive:
        _quietly(child.kill)
    psutil.wait_procs(alive, timeout=1)


def end_tracker(grace_s: float = 5.0) -> None:
    """End Python's resource tracker, for a process that runs another program next: it would stay as a zombie."""
    trackers = [child for child in psutil.Process().children() if _is_tracker(child)]
    if trackers:
        os.close(resource_tracker.getfd())
        psutil.wait_procs(trackers, timeout=grace_s)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _quietly(action: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        action()
