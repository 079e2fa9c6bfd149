"""A contestant as the driver sees it: a process that answers one request at a time."""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError

ROOT = Path(__file__).parents[2]


class ContestantProcess:
    """Starts a worker with the Python of the peer's environment; asked by `contestants.interleave`. Leaving its `with` ends it.

    Args:
        name: of the figures.
        python: the interpreter.
        worker: the module that the process runs; it ends in `worker.answer_requests`.
        arguments: of its worker; what JSON can say.
        answered: called after every answer.

    Raises:
        BenchmarkError: the worker failed, here or at a request, with its own last words.
    """

    def __init__(
        self, name: str, python: str, worker: str, arguments: dict[str, Any], answered: Callable[[], None]
    ) -> None:
        self.name = name
        self._answered = answered
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115 a pipe that is not read would stop a talkative peer
        command = [python, "-m", worker, json.dumps(arguments)]
        try:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, text=True
            )
        except OSError as error:
            self._words.close()
            raise BenchmarkError(f"{name}: {python} cannot be started: {error.strerror}") from None

    def __enter__(self) -> "ContestantProcess":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def about(self) -> dict[str, Any]:
        """Return the worker's description of itself once it is up. Call it first, and once."""
        return self._answer()

    def ask(self, request: dict[str, Any]) -> Any:
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer that is missing tells why
        answer = self._answer()
        self._answered()
        return answer

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.close()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._words.seek(0)
            words = self._words.read().strip().splitlines()[-1:] or ["it said nothing"]
            raise BenchmarkError(f"{self.name} ended without an answer: {words[0]}")
        reply = json.loads(line)
        if "error" in reply:
            raise BenchmarkError(f"{self.name}: {reply['error']}")
        return reply["answer"]
