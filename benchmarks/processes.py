"""Processes of servers, as benchmarks and tests run them: free ports, readiness, figures, and an end that leaves nothing.

A `ServerProcess` is any command of the project that prints one line of JSON once it is ready: `sagellm.serve`,
`sagellm pd up`, `sagellm pd proxy`, or a stand-in of a test.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.errors import ServerDied
from benchmarks.metrics.compute import parse_prometheus
from sagellm.core.early import ENGINE_NAME

READY_S, END_S = 300.0, 30.0
ROOT = Path(__file__).parents[1]

# The kernel gives ports from 32768 on to outgoing connections, which may take a free one before the server does. Each
# worker of a test run has a range of its own and begins somewhere in it, so that two runs on one machine do not meet.
_FIRST_PORT, _NUM_PORTS, _NUM_RANGES = 20000, 2000, 6
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_RANGES
_next_port = secrets.randbelow(_NUM_PORTS)


def free_port() -> int:
    """Return a free port, a new one each time until the range is used up."""
    global _next_port
    for _ in range(_NUM_PORTS):
        port = _FIRST_PORT + _NUM_PORTS * _worker + _next_port
        _next_port = (_next_port + 1) % _NUM_PORTS
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise RuntimeError(f"none of {_NUM_PORTS} ports is free")


def can_listen(port: int) -> bool:
    """Tell whether a new server could take the port at once."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen()
        return True
    return False


def wait_until(what: str, answer: Callable[[], Any], deadline_s: float = END_S, pause_s: float = 0.02) -> Any:
    """Call `answer` until it is true, and return its value. Raises TimeoutError after `deadline_s` seconds."""
    end_s = time.monotonic() + deadline_s
    while not (value := answer()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {deadline_s} s: {what}")
        time.sleep(pause_s)
    return value


def command_line(process: psutil.Process) -> str:
    """Return the words of a process, or nothing if it has ended or is about to."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def engine_processes(family: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return those of the processes that are the engine of a server."""

    def name(process: psutil.Process) -> str:
        with contextlib.suppress(psutil.Error):
            return process.name()
        return ""

    return [each for each in family if name(each) == ENGINE_NAME]


def workers_below(process: psutil.Process) -> list[psutil.Process]:
    """Return the tensor-parallel workers of the CPU device below a process, in their order: forks of a fork server."""
    with contextlib.suppress(psutil.Error):
        forks = {
            each.pid: each for each in process.children(recursive=True)
            if "multiprocessing.forkserver" in command_line(each) and each.status() != psutil.STATUS_ZOMBIE
        }  # fmt: skip
        return [each for _, each in sorted(forks.items()) if each.ppid() in forks]
    return []


class ServerProcess:
    """A server in a process group of its own, with a temporary folder of its own. Its start is not awaited before `ready`.

    Args:
        command: what to run.
        port: its port on the loopback.
        folder: place of its output. Default: the temporary one.
        env: variables besides those of this process.
        cwd: where it runs.
        cores: those it may use. Default: all.

    Attributes:
        url: of the server, without /v1.
        announcement: its readiness line, once `ready`.
        process: the current one.
        own_files: prefixes of the temporary files that it must have removed at its end.
    """

    own_files: tuple[str, ...] = ()

    def __init__(
        self, command: Sequence[object], port: int, folder: Path | None = None, *, env: Mapping[str, str] | None = None,
        cwd: Path = ROOT, cores: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.port, self.url, self.announcement = port, f"http://127.0.0.1:{port}", {}
        # Not in `folder`: the path of a Unix socket has room for 107 bytes, and a server puts some below this one.
        self.tmp = Path(tempfile.mkdtemp(prefix="served-"))
        self.folder = folder or self.tmp
        self.folder.mkdir(parents=True, exist_ok=True)
        self._command, self._cwd, self._cores = [str(word) for word in command], cwd, cores
        self._env = os.environ | {"TMPDIR": str(self.tmp)} | (env or {})
        self._family: dict[int, psutil.Process] = {}
        self.start()

    def start(self) -> None:
        """Start it, also again after its end. The log of the new process follows that of the old one."""
        self.tmp.mkdir(exist_ok=True)
        allow = (lambda: os.sched_setaffinity(0, self._cores)) if self._cores else None
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("ab") as err:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                cwd=self._cwd, env=self._env, preexec_fn=allow,
            )  # fmt: skip

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        with contextlib.suppress(FileNotFoundError):  # its folder goes when it is closed
            return (self.folder / "stderr").read_text(errors="replace")
        return ""

    def ready(self, deadline_s: float = READY_S) -> dict[str, Any]:
        """Wait for the readiness line and return it. Raises ServerDied if the server ends or takes longer."""

        def is_done() -> bool:
            return "\n" in self.stdout or self.process.poll() is not None

        with contextlib.suppress(TimeoutError):
            wait_until("the readiness line", is_done, deadline_s)
        if "\n" not in self.stdout:
            raise ServerDied(f"the server did not become ready: {self.last_words()}")
        self.family()
        self.announcement = json.loads(self.stdout.splitlines()[0])
        return self.announcement

    def check(self) -> None:
        """Raises ServerDied if it has ended."""
        if self.process.poll() is not None:
            raise ServerDied(f"the server ended with code {self.process.returncode}: {self.last_words()}")

    def last_words(self, num_lines: int = 3) -> str:
        """Return the last lines of its log on one line."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        lines = [line for line in lines if "resource_tracker" not in line] or lines  # Python's, on what a death leaves
        return " | ".join(lines[-num_lines:]) or "it said nothing"

    def metrics(self) -> dict[str, float]:
        """Return its Prometheus samples by series (`metrics.compute.series`). Raises ServerDied."""
        try:
            return metrics_of(self.url)
        except OSError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its sockets close before its end can be seen
                self.process.wait(2)
            self.check()
            raise ServerDied(f"no answer from /metrics: {error}") from None

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of that name whose labels include these."""
        return sum_of(self.metrics(), name, **labels)

    def family(self) -> list[psutil.Process]:
        """Return the server and every process below it that was seen so far and still runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            self._family |= {one.pid: one for one in (top, *top.children(recursive=True))}
        return [process for process in self._family.values() if process.is_running()]

    def send(self, number: int, group: bool = False) -> None:
        """Send a signal to the server, or to its whole group."""
        self.family()
        os.killpg(self.process.pid, number) if group else self.process.send_signal(number)

    def end(self, number: int | None = signal.SIGTERM, code: int = 0, group: bool = False) -> None:
        """Send a signal if one is given, and wait for an end in order.

        Raises:
            ServerDied: it does not end, the exit code is another one, or a process, the port or a temporary file is left.
        """
        if number is not None:
            self.send(number, group)
        limit_s = 2 * END_S if number is not None else READY_S
        try:
            found = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise ServerDied(f"the server did not end within {limit_s:g} s: {self.stderr}") from None
        if found != code:
            raise ServerDied(f"the server ended with code {found}, not {code}: {self.stderr}")
        _, alive = psutil.wait_procs(self._family.values(), timeout=20)
        left = [command_line(process) for process in alive]
        left += [path.name for path in self.tmp.iterdir() if path.name.startswith(self.own_files)]
        if left or not can_listen(self.port):
            raise ServerDied(f"the server left something: {left or f'port {self.port}'}")
        shutil.rmtree(self.tmp)

    def kill(self) -> None:
        """End it and all processes below it by force, and remove its temporary folder."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(END_S)
        shutil.rmtree(self.tmp, ignore_errors=True)

    def close(self) -> None:
        """End it in order first, then by force."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                # One that was still starting may begin another process now, so the family is looked at again and again.
                with contextlib.suppress(TimeoutError):
                    wait_until("its end", lambda: (self.family(), self.process.poll())[1] is not None)
        finally:  # also when a second Ctrl-C does not wait
            self.kill()


def manager_process(folder: Path, engines: Mapping[str, Any], **settings: Any) -> ServerProcess:
    """Return the process of `sagellm up` with these engines, to be started.

    Args:
        folder: where its file, its output and its cache go.
        settings: of the file, besides port and engines.
    """
    port, file = free_port(), folder / "up.yaml"
    file.write_text(json.dumps({"port": port, "engines": dict(engines)} | settings))
    words = [sys.executable, "-c", "from sagellm.cli import main; main()", "up", str(file), "--json"]
    return ServerProcess(words, port, folder / "manager", env={"XDG_CACHE_HOME": str(folder / "cache")})


def metrics_of(url: str) -> dict[str, float]:
    """Return the Prometheus samples of a server by series. Raises OSError, or BenchmarkError for another kind of page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return parse_prometheus(answer.read().decode())


def sum_of(samples: Mapping[str, float], name: str, **labels: str) -> float:
    """Sum over the samples of that name whose labels include these."""
    wanted = [re.compile(f'[{{,]{key}="{re.escape(value)}"') for key, value in labels.items()]
    own = [(series, value) for series, value in samples.items() if series.partition("{")[0] == name]
    return sum(value for series, value in own if all(label.search(series) for label in wanted))
