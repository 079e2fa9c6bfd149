"""A prefill/decode group, and a single server to compare it with, from start to end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.errors import ServerDied
from benchmarks.metrics.compute import parse_prometheus

READY_S, END_S = 300.0, 60.0


class Group:
    """A command of the project that says in one line of JSON when it is ready.

    Attributes:
        url: of the server or proxy, without /v1.
        facts: the line.
    """

    def __init__(self, command: Sequence[str], port: int, cores: Sequence[int] = ()) -> None:
        self.url, self.facts = f"http://127.0.0.1:{port}", {}
        self._folder = tempfile.TemporaryDirectory(prefix="sagellm-pd-")
        self._log = Path(self._folder.name) / "stderr"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                cwd=Path(__file__).parents[2], preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
            )  # fmt: skip

    def ready(self) -> "Group":
        """Raises ServerDied: it has ended, or takes too long; in its own words."""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        deadline, text = time.monotonic() + READY_S, b""
        while b"\n" not in text:
            if self.process.poll() is not None or time.monotonic() > deadline:
                words = self.words()
                self.close()
                raise ServerDied(f"not ready: {words}")
            text += self.process.stdout.read() or b""
            time.sleep(0.05)
        self.facts = json.loads(text.splitlines()[0])
        return self

    def words(self, num_lines: int = 5) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-num_lines:])

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def engines(self) -> list[dict[str, Any]]:
        """name, pid, url of each at the start; a server alone is its own."""
        found = self.facts.get("engines") or [{"name": "hybrid0", "pid": self.facts["pid"], "url": self.url}]
        return [each | {"url": each["url"].removesuffix("/v1")} for each in found]

    def close(self) -> None:
        """In order first, then by force; nothing below it stays."""
        family = self.family()
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(END_S)
        finally:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
            self.process.stdout.close()
            self._folder.cleanup()

    def family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        return []

    def __enter__(self) -> "Group":
        return self.ready()

    def __exit__(self, *exception: object) -> None:
        self.close()


def pd_group(flags: Sequence[str] = (), *, serve: Sequence[str] = ()) -> Group:
    """`sagellm pd up` with the demo model; `serve`: flags of its engines."""
    port = free_port()
    command = [sys.executable, "-m", "sagellm.pd", "up", "--port", str(port), "--json", *flags]
    return Group([*command, "--", *serve] if serve else command, port)


def single_server(flags: Sequence[str] = (), cores: Sequence[int] = ()) -> Group:
    """`sagellm serve`: one engine with the demo model."""
    from sagellm.demo_model import ensure_demo_model

    port = free_port()
    command = [sys.executable, "-m", "sagellm.serve", "--model", str(ensure_demo_model()), "--model-name", "sagellm-demo"]
    return Group([*command, "--port", str(port), "--json", *flags], port, cores)


def metrics_of(url: str) -> dict[str, float]:
    """Prometheus samples of a server, by name as `series` writes it. Raises OSError; BenchmarkError: no Prometheus page."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return parse_prometheus(answer.read().decode())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
