"""Transfers of one channel: which run, which wait for their turn, and how one of them is stopped."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import numpy as np

from sagellm.core.errors import TransferCancelled, TransferError, TransferTimeoutError

__all__ = ["Run", "Turns"]


class Run:
    """One transfer, from its call to its end.

    Attributes:
        deadline: of `time.monotonic()`.
        link: what it came to; after a new connection to a peer of the same name it is another.
        stop_flag: uint8 [1], not 0 from the moment somebody stops it: for native code, which looks at it between chunks.
    """

    def __init__(self, transfer_id: str, peer: str, timeout_s: float, link: object = None) -> None:
        self.transfer_id, self.peer, self.timeout_s, self.link = transfer_id, peer, timeout_s, link
        self.deadline = time.monotonic() + timeout_s
        self.stop_flag = np.zeros(1, np.uint8)
        self._error: TransferError | None = None
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    @property
    def left_s(self) -> float:
        """Until the deadline; 0 when it has passed."""
        return max(self.deadline - time.monotonic(), 0.0)

    def check(self) -> None:
        """To be called between chunks of at most a millisecond. Raises TransferCancelled, TransferTimeoutError, TransferError:
        nothing may be written any more."""
        if self._error is not None:
            raise self._error
        if time.monotonic() >= self.deadline:
            raise self.timed_out()

    def raise_end(self) -> NoReturn:
        """Error of a transfer that native code has found stopped or late. Raises as `check`."""
        self.check()
        raise self.timed_out()

    def timed_out(self) -> TransferTimeoutError:
        return TransferTimeoutError(f"transfer {self.transfer_id} from {self.peer}: not done within {self.timeout_s:g} s.")

    def stop(self, error: TransferError) -> None:
        """The first reason counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self.stop_flag[0] = 1
            wakers = list(self._wakers)
        for wake in wakers:
            with suppress(Exception):
                wake()

    @contextmanager
    def woken_by(self, wake: Callable[[], None]) -> Iterator[None]:
        """`wake` is called, from another thread, when the transfer is stopped while this lasts; at once if it is already."""
        with self._lock:
            is_stopped = self._error is not None
            self._wakers.append(wake)
        try:
            if is_stopped:
                wake()
            yield
        finally:
            with self._lock:
                self._wakers.remove(wake)


class Turns:
    """At most `max_running` transfers run; others wait, first come, first served."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._changed = threading.Condition()
        self._waiting: dict[str, Run] = {}  # both by name, in their order
        self._running: dict[str, Run] = {}
        self._closed: TransferError | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, run: Run) -> None:
        """Waits, and then counts as running, until `end`. Raises as `Run.check`; TransferError: another one has its name, or
        closed."""
        name = run.transfer_id
        with self._changed:
            if self._closed is not None:
                raise self._closed
            if name in self._running or name in self._waiting:
                raise TransferError(f"transfer {name} is under way already; each one needs a name of its own.")
            if self._waiting or len(self._running) >= self._max_running:
                self._wait(run)
            run.check()
            self._running[name] = run

    def end(self, run: Run) -> None:
        """A transfer that has begun."""
        with self._changed:
            del self._running[run.transfer_id]
            if self._waiting or self._closed is not None:
                self._changed.notify_all()

    def _wait(self, run: Run) -> None:
        self._waiting[run.transfer_id] = run
        try:
            with run.woken_by(self._wake):
                while next(iter(self._waiting.values())) is not run or len(self._running) >= self._max_running:
                    run.check()
                    self._changed.wait(run.left_s)
        finally:
            del self._waiting[run.transfer_id]
            self._changed.notify_all()

    def cancel(self, transfer_id: str) -> bool:
        error = TransferCancelled(f"transfer {transfer_id} was cancelled.")
        return self._stop(lambda run: run.transfer_id == transfer_id, error) > 0

    def leave(self, link: object) -> None:
        """Those over this link fail."""
        self._stop(lambda run: run.link is link, TransferError("the peer was disconnected."))

    def close(self, timeout_s: float) -> None:
        """All are cancelled, and have ended when this returns, unless they need longer."""
        with self._changed:
            self._closed = TransferError("the channel is closed.")
        self._stop(lambda run: True, TransferCancelled("the channel was closed."))
        with self._changed:
            self._changed.wait_for(lambda: not self._running and not self._waiting, timeout_s)

    def _stop(self, is_meant: Callable[[Run], bool], error: TransferError) -> int:
        with self._changed:
            runs = [run for run in (*self._waiting.values(), *self._running.values()) if is_meant(run)]
        for run in runs:
            run.stop(error)
        return len(runs)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
