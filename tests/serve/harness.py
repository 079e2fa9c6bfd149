"""Starts `python -m sagellm.serve` as users do, and proves at its end that nothing is left of it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.host import command_line, free_port

READY_S = 90.0
END_S = 30.0
KEY = "key-of-the-tests"


def wait_until(what: str, answer: Callable[[], Any], deadline_s: float = END_S) -> Any:
    """The first true answer. A deadline that passes is a failure; no test passes by waiting."""
    end = time.monotonic() + deadline_s
    while True:
        value = answer()
        if value:
            return value
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)


def can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True


class ServerProcess:
    """A server of a process group of its own. Nothing is awaited before `ready`."""

    def __init__(self, folder: Path, *options: object, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Not in `folder`: the path of a Unix socket has room for 107 bytes, and the server puts some below this one.
        self.tmp = Path(tempfile.mkdtemp(prefix="served-"))
        command = [sys.executable, "-m", "sagellm.serve", "--port", str(self.port), "--json", *map(str, options)]
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            environment = os.environ | {"TMPDIR": str(self.tmp)} | (env or {})
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
        self._family: dict[int, psutil.Process] = {}

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def ready(self) -> "ServerProcess":
        def line() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.stderr}"
            return "\n" in self.stdout

        wait_until("the readiness line", line, READY_S)
        self.announcement = json.loads(self.stdout)
        self.model = self.announcement["model"]
        return self

    def family(self) -> list[psutil.Process]:
        """Every process below the server that was seen so far."""
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._family[child.pid] = child
        except psutil.NoSuchProcess:
            pass
        return list(self._family.values())

    def engine_process(self) -> psutil.Process:
        """The child that loads the model: of the spawned ones, the resource tracker is the other."""

        def spawned() -> list[psutil.Process]:
            return [p for p in self.family() if p.is_running() and "spawn_main" in command_line(p)]

        return wait_until("an engine process", spawned)[-1]

    def send(self, number: int, group: bool = False) -> None:
        self.family()
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self, number: int | None = signal.SIGTERM, code: int = 0, group: bool = False) -> None:
        """Send a signal if one is given, then wait; the exit code must be `code` and nothing may be left."""
        if number is not None:
            self.send(number, group)
        # Without a signal, the wait is that for a whole start.
        assert self.process.wait(END_S if number is not None else READY_S + END_S) == code, self.stderr
        _, alive = psutil.wait_procs(self._family.values(), timeout=20)
        assert not alive, f"left behind: {[command_line(p) for p in alive]}"
        assert can_listen(self.port)
        assert not [path for path in self.tmp.iterdir() if path.name.startswith(("sagellm-", "pymp-"))]

    def kill(self) -> None:
        """Clean up after a test, also one that failed."""
        for process in [*self.family(), self.process]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
        self.process.wait(END_S)
        shutil.rmtree(self.tmp, ignore_errors=True)

    def client(self, key: str = KEY) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path: str, body: Any, key: str | None = KEY, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        options["content" if isinstance(body, (bytes, str)) else "json"] = body
        headers |= {"Content-Type": "application/json"} | options.pop("headers", {})
        return httpx.post(self.url + path, headers=headers, timeout=60, **options)

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of that name whose labels include these."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def wait_for_metric(self, what: str, holds: Callable[[float], bool], name: str, **labels: str) -> None:
        wait_until(what, lambda: holds(self.metric(name, **labels)))

    def wait_idle(self) -> None:
        """Until no request holds a block."""
        self.wait_for_metric("no active block", lambda n: n == 0, "sagellm_kv_blocks", state="active")
