"""A process of the group: started, listened to, ended."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import psutil

from sagellm.core.errors import EngineError
from sagellm.core.tasks import within

__all__ = ["Child"]

PR_SET_PDEATHSIG = 1
KEPT_LINES = 40


class Child:
    """One process, that may be started several times. It prints one JSON line when it is ready; what else it says is passed on
    to standard error, with its name before each line.

    Args:
        cores: that it is kept on; empty: all.
        say: takes what it prints to standard error.

    Attributes:
        ready: done with the JSON line, or None where the process ended before it.
        num_starts: so far.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, cores: Sequence[int] = (), env: dict[str, str] | None = None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:  # fmt: skip
        self.name, self.command = name, list(command)
        self.num_starts = 0
        self.ready: asyncio.Future[dict[str, Any] | None]
        self._cores, self._env, self._say = list(cores), env, say
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task] = []
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self._error = ""  # its last one; libraries may say many lines after it

    async def start(self) -> None:
        """Raises EngineError: the system gives no process now; it may be tried again."""
        self.ready = asyncio.get_running_loop().create_future()
        self._last.clear()
        self._error = ""
        # A session of its own: Ctrl-C reaches us alone, and we end the others in order.
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                start_new_session=True, env=self._env, preexec_fn=self._in_child, limit=1 << 20,
            )  # fmt: skip
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            # No process, no thread that waits for it, no such core.
            words = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise EngineError(f"it cannot be started: {words}.") from error
        self.num_starts += 1
        self._readers = [
            asyncio.create_task(self._read_stdout(self._process.stdout)),
            asyncio.create_task(self._read_stderr(self._process.stderr)),
        ]

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Until it has ended; its exit code, negative for a signal."""
        assert self._process is not None
        code = await self._process.wait()
        await asyncio.wait(self._readers, timeout=1)  # a process below it may hold the pipes open
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        if not self.ready.done():
            self.ready.set_result(None)
        return code

    def words(self, code: int) -> str:
        """Why it has ended: its last error in its own words, else the exit code and the last line."""
        if self._error:
            return self._error
        how = f"it was ended by signal {-code}" if code < 0 else f"it ended with code {code}"
        return f"{how}; its last line: {self._last[-1]!r}." if self._last else f"{how}, without a word."

    def send(self, number: int) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)  # type: ignore[union-attr]

    async def end(self, grace_s: float) -> None:
        """Ask it to end, and after `grace_s` kill it, and all that is left of its session."""
        if self._process is None:
            return
        family = self._family()
        self.send(signal.SIGTERM)
        try:
            await within(asyncio.shield(self._process.wait()), grace_s)
        except asyncio.TimeoutError:
            self._say(f"[{self.name}] has not ended within {grace_s:g} s and is killed")
            self.send(signal.SIGKILL)
            await self._process.wait()
        self._kill(family)

    def kill(self) -> None:
        family = self._family()
        self.send(signal.SIGKILL)
        self._kill(family)

    def _family(self) -> list[psutil.Process]:
        if not self.is_running:  # its number may be another process's by now
            return []
        try:
            return psutil.Process(self._process.pid).children(recursive=True)  # type: ignore[union-attr]
        except psutil.Error:
            return []

    @staticmethod
    def _kill(family: list[psutil.Process]) -> None:
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil knows a pid that was given to another process meanwhile

    def _in_child(self) -> None:
        # Between fork and exec. A kill of the supervisor ends the group too.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if self._cores:
            os.sched_setaffinity(0, self._cores)

    async def _read_stdout(self, stream: Any) -> None:
        async for text in _lines(stream):
            with contextlib.suppress(ValueError):
                found = json.loads(text)
                if isinstance(found, dict) and found.get("ready") and not self.ready.done():
                    self.ready.set_result(found)
                    continue
            self._say(f"[{self.name}] {text}")

    async def _read_stderr(self, stream: Any) -> None:
        async for text in _lines(stream):
            self._last.append(text)
            if text.startswith("error: "):
                self._error = text.removeprefix("error: ")
            self._say(f"[{self.name}] {text}")


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield lines until the end of the stream: a process that writes into an unread pipe stands still."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # a line beyond the limit: what is left of it comes next
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()
