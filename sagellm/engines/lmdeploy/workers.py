"""Tensor-parallel workers: messages that outlive a dead process, and a watch that ends what waits for a dead worker.

LMDeploy's executor sends messages by `multiprocessing.Event`. A process that is killed while it waits for one leaves the event
so that setting it blocks for ever, the executor's own end included. The executor waits for a dead worker's answer without a
limit, and so do the other workers, in a collective.
"""

import asyncio
import copyreg
import io
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import psutil
import torch

from sagellm.core.config import HookConfig
from sagellm.core.errors import EngineError
from sagellm.core.host import ENGINE_ENDED, ENGINE_PROCESS
from sagellm.engines.lmdeploy.worker_processes import end_early

__all__ = [
    "END_S", "HANG_S", "LOOK_S", "LOST_S", "Notifier", "Pickling", "Watch", "WorkerWatch", "building", "failure_of", "hangs",
]  # fmt: skip

logger = logging.getLogger("sagellm")

LOOK_S = 1.0  # how often a wait looks whether the connection is broken
HANG_S, LOST_S = 4.0, 60.0
FIRST_S = 60.0  # a step may take before one of its sort was measured
END_S = 5.0  # for workers to end when they are told to; those left are killed
ERROR_BYTES = 500  # of the error that ended a worker
_watches: list["Watch"] = []


class Notifier:
    """Counts the messages in a ring of shared memory for each receiver, in place of LMDeploy's class of this name.

    At the end of each half of the ring a sender waits until all receivers have read the other half, whose places come next.
    Semaphores have no owner, so the death of a process blocks no other. After `abort` every wait raises BrokenBarrierError.
    A receiver also leaves the last error that LMDeploy logs there, for `first_error`.
    """

    def __init__(self, num_receiver: int, mp_ctx: Any) -> None:
        from lmdeploy.pytorch.engine.executor.mp_executor import NUM_SHARED_BLOCK

        self._half, self._num_messages, self._receiver = NUM_SHARED_BLOCK // 2, 0, 0
        self._sent = [mp_ctx.Semaphore(0) for _ in range(num_receiver)]
        self._read = [mp_ctx.Semaphore(0) for _ in range(num_receiver)]  # halves that each has read
        self._is_broken = mp_ctx.RawValue("b", 0)
        self._errors = [(mp_ctx.RawValue("d", 0), mp_ctx.RawArray("c", ERROR_BYTES)) for _ in range(num_receiver)]

    def receive_as(self, number: int) -> None:
        """Take a receiver's place; below 0 for a sender."""
        self._receiver = max(0, number)
        if number >= 0:
            logging.getLogger("lmdeploy").addHandler(_LastError(*self._errors[number]))

    def first_error(self, since: float) -> tuple[int, str] | None:
        """Return which receiver has failed first, and how. The errors of others often follow from that one.

        Args:
            since: seconds on the clock of `time.monotonic`; earlier errors ended nothing.
        """
        found = [(at.value, number) for number, (at, _) in enumerate(self._errors) if at.value >= since]
        number = min(found)[1] if found else -1
        return (number, self._errors[number][1].value.decode(errors="ignore")) if found else None

    @property
    def bar(self) -> "Notifier":
        return self

    @property
    def broken(self) -> bool:
        return bool(self._is_broken.value)

    def abort(self) -> None:
        self._is_broken.value = 1
        for semaphore in (*self._sent, *self._read):
            semaphore.release()

    close = abort

    def set(self) -> None:
        """Announce a message."""
        for semaphore in self._sent:
            semaphore.release()
        if self._ends_half() and self._num_messages > self._half:
            for semaphore in self._read:
                self._take(semaphore)

    async def set_async(self) -> None:
        """Announce a message, without letting another task run.

        LMDeploy moves on in the ring only afterwards: a message of another task would take the place of this one, and its
        receiver would read an old one.
        """
        self.set()

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Wait for a message. It is read inside of the block."""
        self._take(self._sent[self._receiver])
        yield
        self._was_read()

    @asynccontextmanager
    async def wait_async(self) -> AsyncIterator[None]:
        await asyncio.get_running_loop().run_in_executor(None, self._take, self._sent[self._receiver])
        yield
        self._was_read()

    def _ends_half(self) -> bool:
        """Count a message, and return whether it is the last one of a half."""
        self._num_messages += 1
        return self._num_messages % self._half == 0

    def _was_read(self) -> None:
        if self._ends_half():
            self._read[self._receiver].release()

    def _take(self, semaphore: Any) -> None:
        while not semaphore.acquire(timeout=LOOK_S) and not self.broken:
            pass
        if self.broken:
            raise threading.BrokenBarrierError


class _LastError(logging.Handler):
    """Writes the time and the exception of a log record, cut to `ERROR_BYTES`, to memory of two processes."""

    def __init__(self, at: Any, text: Any) -> None:
        super().__init__(logging.ERROR)
        self._at, self._text = at, text

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._text.value = f"{type(error).__name__}: {error}".encode()[: ERROR_BYTES - 1]
            self._at.value = time.monotonic()


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Reduce a tensor to an array, which pickles ten times as quickly: torch's own way writes a file for each."""
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.requires_grad
    if not is_plain or tensor.dtype == torch.bfloat16:  # NumPy has no such type
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return torch.from_numpy, (tensor.numpy(),)


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {torch.Tensor: _tensor}


class Pickling:
    """Messages between the executor and its workers as bytes, in place of the module `pickle`."""

    HIGHEST_PROTOCOL = pickle.HIGHEST_PROTOCOL
    loads = staticmethod(pickle.loads)

    @staticmethod
    def dumps(message: Any, protocol: int) -> bytes:
        """Pickle a message."""
        written = io.BytesIO()
        _Pickler(written, protocol).dump(message)
        return written.getvalue()


class Watch(ABC):
    """Notices when a worker of an executor dies or hangs.

    It then ends the others, which wait for that one in a collective, and ends the engine's loop: requests end with an error.
    A server's engine process ends as a whole, after it has left the reason for the server.

    The slowest steps so far say when a step's result is late.

    Args:
        executor: LMDeploy's executor, whose workers have been started.
    """

    def __init__(self, executor: Any) -> None:
        self.failure = ""
        self.executor = executor
        self._is_ending = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task | None = None
        self._pending: deque[tuple[bool, int]] = deque()  # results to come: of a decode step, new tokens
        self._since = 0.0  # when the step of the first of them began
        self._slowest: dict[bool, float] = {}  # seconds of a step; True: of a decode step
        self._most_tokens: dict[bool, int] = {}  # of a step
        self._lock = threading.Lock()
        _watches.append(self)

    def watch(self) -> None:
        """Begin, on a thread."""
        threading.Thread(target=self._run, name="sagellm-workers", daemon=True).start()

    def started(self) -> None:
        """The engine's loop begins, in this task."""
        self._loop, self._main = asyncio.get_running_loop(), asyncio.current_task()

    def sent(self, inputs: dict[str, Any]) -> None:
        """A forward pass goes to the workers. `inputs`: LMDeploy's arguments of it."""
        step = inputs["inputs"]
        with self._lock:
            if not self._pending:
                self._since = time.monotonic()
            self._pending.extend([(step.is_decoding, step.input_ids.numel())] * inputs.get("loop_count", 1))

    def received(self, count: int) -> None:
        """Results have come."""
        with self._lock:
            for _ in range(min(count, len(self._pending))):
                is_decoding, tokens = self._pending.popleft()
                took_s = time.monotonic() - self._since
                self._slowest[is_decoding] = max(took_s, self._slowest.get(is_decoding, 0.0))
                self._most_tokens[is_decoding] = max(1, tokens, self._most_tokens.get(is_decoding, 0))
                self._since = time.monotonic()

    def _forget(self) -> bool:
        """Return whether this was not called before."""
        if self not in _watches:
            return False
        _watches.remove(self)
        return True

    @abstractmethod
    def _run(self) -> None:
        """Watch until `_is_ending` is set or a worker fails, then call `_fail`."""

    @abstractmethod
    def _kill(self) -> None:
        """End all workers at once."""

    def _late_s(self, now: float) -> float:
        """Seconds by which the next result is later than could be expected; 0 or less if it is not.

        A step is expected to take as long as the slowest of its sort, and longer if it has more tokens than any of them.
        """
        if not self._pending:
            return 0.0
        is_decoding, tokens = self._pending[0]
        slowest = self._slowest.get(is_decoding)
        expected_s = FIRST_S if slowest is None else slowest * max(1.0, tokens / self._most_tokens[is_decoding])
        return now - self._since - expected_s

    def _fail(self, who: str, how: str) -> None:
        self.failure = f"tensor-parallel worker {who} {how}"
        logger.error("%s; the engine stops", self.failure)
        self._kill()
        if multiprocessing.current_process().name == ENGINE_PROCESS:
            self._end_process()
        for buffer in self._buffers():  # what waits for a message fails
            buffer.notifier.abort()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self.executor.stop()
        if self._main is not None:
            self._main.cancel()

    def _buffers(self) -> Sequence[Any]:
        """Shared memory of messages, LMDeploy's `SharedBuffer`."""
        return ()

    def _end_process(self) -> None:
        spec = getattr(self.executor.misc_config, "sage", None)
        run_dir: Path | None = HookConfig.model_validate_json(spec).run_dir if spec else None
        if run_dir is not None:
            with suppress(OSError):
                (run_dir / ENGINE_ENDED).write_text(self.failure)
        for buffer in self._buffers():
            with suppress(FileNotFoundError):
                buffer.shm.unlink()
        sys.stderr.flush()
        os._exit(1)


class WorkerWatch(Watch):
    """Watches the processes of LMDeploy's `MPExecutor`. Made on the main thread.

    A worker hangs if the result is `HANG_S` seconds late and the worker has used no processor time meanwhile. It also counts
    as hanging if the result is `LOST_S` seconds late.
    """

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        # A worker that fails says so by this signal, and ends. LMDeploy would end this process.
        signal.signal(signal.SIGUSR1, lambda *_: None)
        self._processes = [each._proc for each in executor.procs]
        self.watch()

    def end(self) -> None:
        """End the workers. Called again it does nothing."""
        self._is_ending.set()
        if not self._forget():
            return
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        if not _watches:
            end_early()

    def _run(self) -> None:
        numbers = {process.sentinel: number for number, process in enumerate(self._processes)}
        before, spent = time.monotonic(), list[float]()
        while not self._is_ending.is_set():
            dead = wait_for_any(list(numbers), LOOK_S)
            if self._is_ending.is_set():
                return
            if dead:
                number, how = self._ending(min(numbers[each] for each in dead))
                self._fail(self._name(number), how)
                return
            now = time.monotonic()
            with self._lock:
                self._since += max(0.0, now - before - 2 * LOOK_S)  # this process was stopped itself
                late_s = self._late_s(now)
            before = now
            if late_s <= 0:
                spent = []
                continue
            times = self._processor_times()
            spent = spent or times
            idle = [number for number, each in enumerate(times) if each == spent[number]]
            if late_s > LOST_S or (late_s > HANG_S and idle):
                self._fail(self._name(idle[0] if idle else 0), hangs(late_s))
                return

    def _ending(self, number: int) -> tuple[int, str]:
        """Return which worker's end was the first, and how it ended, from one that has ended."""
        self._processes[number].join()
        code = self._processes[number].exitcode
        if code is not None and code < 0:
            return number, f"was ended by signal {signal.Signals(-code).name}"
        error = self.executor.comm_buf.notifier.first_error(since=time.monotonic() - END_S)
        return (number, f"ended with code {code}") if error is None else (error[0], f"failed: {error[1]}")

    def _name(self, number: int) -> str:
        return f"{number} (process {self._processes[number].pid})"

    def _processor_times(self) -> list[float]:
        found = []
        for process in self._processes:
            with suppress(psutil.Error):
                times = psutil.Process(process.pid).cpu_times()
                found.append(times.user + times.system)
                continue
            found.append(-1.0)
        return found

    def _buffers(self) -> Sequence[Any]:
        return self.executor.comm_buf, *self.executor.ret_bufs

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()


def hangs(late_s: float) -> str:
    """Say that a worker does not go on."""
    return f"hangs: the result of a step is {late_s:.0f} s late"


@contextmanager
def building() -> Iterator[None]:
    """While an engine is built: if that fails, its workers end, and the error says which worker died."""
    before = list(_watches)
    try:
        yield
    except BaseException as error:
        failures = []
        for watch in [each for each in _watches if each not in before]:
            failures.append(watch.failure)
            watch.executor.release()
        if any(failures):
            raise EngineError(f"{failures[0]} while the engine was built; its log says why.") from error
        raise


def failure_of(executor: Any) -> str:
    """Return which worker's death has stopped an engine; empty if none has."""
    watch = getattr(executor, "sage_watch", None)
    return "" if watch is None else watch.failure
