"""Tensor-parallel workers of a server that are killed while it answers: `python -m benchmarks.worker_kills --server`.

The server runs the demo model with `--tensor-parallel 2 --restart-workers`. In each round clients ask, half of them for
streams, and a worker gets SIGKILL at a random moment. A request that was sent before must end with its answer, or within
`LATE_S` seconds with an error that names the worker. `/health` must fail and then succeed again, the next answer must be right,
and neither a process nor shared memory of before may be left.
"""

import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.contestants import summary
from benchmarks.errors import BenchmarkError
from benchmarks.output import Output
from benchmarks.processes import ServerProcess, command_line, free_port, wait_until, workers_below
from sagellm.demo_model import ensure_demo_model

__all__ = ["COUNTS", "FAULTS", "sweep"]

LATE_S, READY_S = 5.0, 180.0
MODEL = "demo"
CLIENTS, TOKENS = 4, 300
CALM_S = 1.0  # the requests of a round begin within it, and the kill comes within twice that
PROMPTS = [f"def function_{number}(" for number in range(CLIENTS)]
FAULTS = ("wrong", "unclear", "late", "healthy_throughout", "left_processes", "left_memory")
COUNTS = ("answers", "errors", "refused", *FAULTS)


class Reply(NamedTuple):
    """The answer to a request, or its error.

    Attributes:
        text: of the answer, or its beginning.
        error: empty if the answer is complete.
        begun, ended: on the clock of `time.monotonic`.
        was_heard: False if the server sent nothing at all.
        was_refused: True if it took no connection.
    """

    text: str
    error: str
    begun: float
    ended: float
    was_heard: bool = True
    was_refused: bool = False


def sweep(kills: int, seed: int, output: Output | None = None) -> dict[str, Any]:
    """Kill so many workers, one a round, and return counts and times. Those of `FAULTS` must be 0."""
    chance = random.Random(seed)
    counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
    error_s: list[float] = []
    back_s: list[float] = []
    unclear: list[str] = []
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kills-") as place, contextlib.closing(_server(Path(place))) as server:
        server.ready(READY_S)
        expected = {prompt: answered(server, prompt) for prompt in PROMPTS}
        for number in range(kills):
            _round(server, number, chance, expected, counts, error_s, back_s, unclear)
            result = {
                "kills": number + 1, "seed": seed, "clients": CLIENTS, **counts,
                "kill_to_error_s": summary(error_s) if error_s else {}, "longest_to_error_s": max(error_s, default=0.0),
                "back_s": summary(back_s), "unclear_errors": unclear,
            }  # fmt: skip
            if output is not None:
                output.save(result)
        server.end()  # raises if something is left
    return result


def _server(folder: Path) -> ServerProcess:
    port = free_port()
    options = ("--tensor-parallel", 2, "--restart-workers", "--threads", 1, "--kv-blocks", 256, "--dtype", "float32")
    model = ("--model", ensure_demo_model(), "--model-name", MODEL)
    words = [sys.executable, "-m", "sagellm.serve", *model, "--port", port, "--json", *options]
    return ServerProcess(words, port, folder / "server")


def _round(
    server: ServerProcess, number: int, chance: random.Random, expected: dict[str, str], counts: Counter[str],
    error_s: list[float], back_s: list[float], unclear: list[str],
) -> None:  # fmt: skip
    family = [each for each in server.family() if each.pid != server.process.pid]
    memory = memory_of(family)
    clients = [Client(server.url, prompt, place % 2 == 1, chance.uniform(0, CALM_S)) for place, prompt in enumerate(PROMPTS)]
    time.sleep(chance.uniform(0, 2 * CALM_S))
    victim = workers_below(psutil.Process(server.process.pid))[chance.randrange(2)]
    killed = time.monotonic()
    victim.kill()
    health = Health(server.url)
    for reply in [client.reply() for client in clients]:
        _judge(reply, expected, killed, counts, error_s, unclear)
    wait_until("the server is ready again", lambda: _is_ready(server, number + 2), READY_S)
    back_s.append(time.monotonic() - killed)
    counts["healthy_throughout"] += not health.has_failed()
    counts["wrong"] += any(answered(server, prompt) != expected[prompt] for prompt in PROMPTS)
    left = psutil.wait_procs([each for each in family if "resource_tracker" not in command_line(each)], timeout=20)[1]
    counts["left_processes"] += len(left)
    counts["left_memory"] += sum((Path("/dev/shm") / name).exists() for name in memory)


def _judge(
    reply: Reply, expected: dict[str, str], killed: float, counts: Counter[str], error_s: list[float], unclear: list[str]
) -> None:
    if not reply.error:
        counts["answers"] += 1
        counts["wrong"] += reply.text not in expected.values()
        return
    # A server that is away, or about to be, says nothing.
    if reply.was_refused or (reply.begun > killed and not reply.was_heard):
        counts["refused"] += 1
        return
    counts["errors"] += 1
    counts["wrong"] += not any(text.startswith(reply.text) for text in expected.values())
    if "tensor-parallel worker" not in reply.error:
        counts["unclear"] += 1
        unclear.append(reply.error)
    error_s.append(max(0.0, reply.ended - max(killed, reply.begun)))
    counts["late"] += error_s[-1] > LATE_S


def _is_ready(server: ServerProcess, times: int) -> bool:
    server.check()
    if server.stdout.count('"ready": true') < times:
        return False
    server.family()
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    return False


class Client(threading.Thread):
    """Sends one request after a time."""

    def __init__(self, url: str, prompt: str, stream: bool, after_s: float) -> None:
        super().__init__(daemon=True)
        self._arguments, self._after_s = (url, prompt, stream), after_s
        self._reply: Reply | None = None
        self.start()

    def run(self) -> None:
        time.sleep(self._after_s)
        self._reply = ask(*self._arguments)

    def reply(self) -> Reply:
        """Return what came, once it is there."""
        self.join(READY_S)
        if self._reply is None:
            raise TimeoutError(f"a request has waited for {READY_S:g} s")
        return self._reply


class Health(threading.Thread):
    """Asks for `/health` until it fails."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self._ends, self._failed = url, threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ends.wait(0.01):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self._url}/health", timeout=READY_S).status_code == 200:
                    continue
            self._failed.set()
            return

    def has_failed(self) -> bool:
        self._ends.set()
        self.join()
        return self._failed.is_set()


def ask(url: str, prompt: str, stream: bool) -> Reply:
    """Ask for a completion, and return what came of it."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    begun, text, error, was_heard = time.monotonic(), "", "", False
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=READY_S) as answer:
            was_heard = True
            if not stream or answer.status_code != 200:
                found = json.loads(answer.read())
                text = found["choices"][0]["text"] if "choices" in found else ""
                return Reply(text, "" if text else json.dumps(found), begun, time.monotonic())
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    error = str(event["error"]) if "error" in event else error
                    text += "".join(choice["text"] for choice in event.get("choices", ()))
    except httpx.ConnectError as failed:
        return Reply("", str(failed), begun, time.monotonic(), was_heard=False, was_refused=True)
    except (httpx.HTTPError, ValueError) as failed:
        error = f"{type(failed).__name__}: {failed}"
    return Reply(text, error, begun, time.monotonic(), was_heard)


def answered(server: ServerProcess, prompt: str) -> str:
    """Return an answer. Raises BenchmarkError: it failed, though all workers live."""
    reply = ask(server.url, prompt, False)
    if reply.error or not reply.text:
        raise BenchmarkError(f"no answer of a server whose workers live: {reply.error}")
    return reply.text


def memory_of(family: list[psutil.Process]) -> set[str]:
    """Return the names in /dev/shm that these processes have open."""
    found: set[str] = set()
    for process in family:
        with contextlib.suppress(psutil.Error):
            paths = [Path(each.path) for each in process.memory_maps()]
            found |= {path.name for path in paths if path.parent == Path("/dev/shm") and path.exists()}
    return found
