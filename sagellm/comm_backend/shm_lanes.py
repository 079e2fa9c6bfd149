"""Operations of the backend `shm`, and the lanes that keep those of one kind in order.

A call that waits runs in the caller's thread: handing it to another one costs more than a small message. A call that is waited
for later runs on the lane's own thread, after the calls that were started there before. A message that is read in place runs
there with the wait for its reader alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from sagellm.comm_backend.base import Work
from sagellm.core.errors import CommError

__all__ = ["Lane", "Operation", "Rest"]

Rest = Callable[[], None] | None  # what is left to do of a call, if anything


class Operation(Work):
    """A call that is run once, in its lane."""

    __slots__ = ("_error", "_is_done", "_kept", "_lane", "_rest", "ended", "is_quick")

    def __init__(self, lane: Lane, call: Callable[[], Rest], *kept: object) -> None:
        self._lane, self._kept = lane, kept
        self._rest: Rest | Callable[[], Rest] = call
        self._error: BaseException | None = None
        self._is_done = False
        self.ended: threading.Event | None = None  # once it was handed to the lane's thread
        self.is_quick = False  # its call waits for nothing, only the rest of it does

    def is_completed(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        if self.ended is not None:
            self.ended.wait()
        elif not self._is_done:
            self._lane.run(self)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def start(self) -> None:
        """On the lane's thread."""
        self._lane.start(self)

    def advance(self) -> None:
        """Run its call, then the rest of it. Kept objects are released at the end."""
        call, self._rest = self._rest, None
        assert call is not None
        try:
            self._rest = call()
        except CommError as error:
            self._error = error
        except BaseException as error:
            self._lane.break_off(error)
            self._error = error
        if self._rest is None:
            self._kept = ()
            self._is_done = True
            if self.ended is not None:
                self.ended.set()


class Lane:
    """Operations that run one after the other: messages to one rank, messages from one rank, or collectives."""

    def __init__(self, name: str, fail: Callable[[str], None]) -> None:
        self.name, self.fail = name, fail
        self._lock = threading.Lock()
        self._num_pending = 0
        self._num_behind = 0  # those of them whose call is the thread's to make
        self._queue: SimpleQueue[Operation | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self, operation: Operation) -> None:
        """Run it on the lane's thread."""
        operation.ended = threading.Event()
        with self._lock:
            if self._is_closed:
                raise CommError("this group of shm is closed; make a new one.")
            self._num_pending += 1
            if operation.is_quick and not self._num_behind:
                operation.advance()  # the receiver need not wait until this lane's thread has come to it
            else:
                operation.is_quick = False
                self._num_behind += 1
            self._queue.put(operation)
            if self._thread is None:
                # A daemon, or the interpreter would wait for it before it closes the group, which ends it.
                self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self._thread.start()

    def run(self, operation: Operation) -> None:
        """Run it in this thread, or, behind others, on the lane's thread; it has ended then."""
        if not self.enter():
            self.start(operation)
            assert operation.ended is not None
            operation.ended.wait()
            return
        try:
            while not operation.is_completed():
                operation.advance()
        finally:
            self.leave()

    def enter(self) -> bool:
        """Whether nothing is under way here; then it is the caller's, until it calls `leave`."""
        with self._lock:
            if self._num_pending:
                return False
            self._num_pending = 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._num_pending -= 1

    def break_off(self, error: BaseException) -> None:
        """A call ended by Ctrl-C, or for want of memory: others wait for the rest of it."""
        self.fail(f"{self.name} was broken off by {error!r}; make a new group.")

    def close(self) -> None:
        """Waits for what runs, which has to be ended before; what has not begun ends as the group's end has it."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
            self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self) -> None:
        while (operation := self._queue.get()) is not None:
            while not operation.is_completed():
                operation.advance()
            with self._lock:
                self._num_pending -= 1
                self._num_behind -= not operation.is_quick
            del operation  # and with it the last hold on its result, while this waits for the next
