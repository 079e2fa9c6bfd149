"""A real server under test: started from a configuration, watched, and taken down with everything below it."""

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
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.errors import BenchmarkError, ServerDied
from sagellm.core.config import SageConfig

READY_S, END_S = 300.0, 30.0


class Server:
    """`python -m sagellm.serve` in a process group of its own, on a free port of the loopback.

    `checkout` names another checkout of the project, whose `.venv` and code are used instead of this one's.
    """

    def __init__(self, config: SageConfig, checkout: Path | None = None) -> None:
        self.checkout = (checkout or Path(__file__).parents[1]).resolve()
        self._folder = tempfile.TemporaryDirectory(prefix="sagellm-benchmark-")
        port = _free_port()
        values = config.model_dump(mode="json", exclude_unset=True) | {"host": "127.0.0.1", "port": port}
        file = Path(self._folder.name) / "server.yaml"
        file.write_text(yaml.safe_dump(values))
        self.url = f"http://127.0.0.1:{port}"
        self.api_key = config.api_key[0] if config.api_key else None
        self._log = Path(self._folder.name) / "stderr"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [interpreter(checkout), "-m", "sagellm.serve", "--config", str(file), "--json"],
                cwd=self.checkout, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._family: dict[int, psutil.Process] = {}

    def ready(self) -> dict[str, Any]:
        """Wait for the readiness line and return it. Raises ServerDied."""
        os.set_blocking(self.process.stdout.fileno(), False)
        deadline, text = time.monotonic() + READY_S, b""
        while b"\n" not in text:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ServerDied(f"the server did not become ready: {self.last_words()}")
            text += self.process.stdout.read() or b""
            time.sleep(0.05)
        self.family()
        return json.loads(text.splitlines()[0])

    def check(self) -> None:
        """Raises ServerDied if it has ended."""
        if self.process.poll() is not None:
            raise ServerDied(f"the server ended with code {self.process.returncode}: {self.last_words()}")

    def last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        lines = [line for line in lines if "resource_tracker" not in line] or lines  # Python's, on what a death leaves
        return " | ".join(lines[-3:]) or "it said nothing"

    def metrics_text(self) -> str:
        """The Prometheus page. Raises ServerDied."""
        try:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
                return answer.read().decode()
        except OSError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its sockets close before its end can be seen
                self.process.wait(2)
            self.check()
            raise ServerDied(f"no answer from /metrics: {error}") from None

    def family(self) -> list[psutil.Process]:
        """The server and every process below it that was seen so far."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            for process in (top, *top.children(recursive=True)):
                self._family[process.pid] = process
        return [process for process in self._family.values() if process.is_running()]

    def forget_peak_memory(self) -> None:
        """Start counting peaks anew (Linux: 5 into clear_refs)."""
        for process in self.family():
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_memory_bytes(self) -> int:
        """Sum over the processes of the largest resident set since the last call of `forget_peak_memory`."""
        total = 0
        for process in self.family():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                total += next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        return total

    def close(self) -> None:
        """End it: in order first, then by force; nothing below it stays."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                end = time.monotonic() + END_S
                while self.process.poll() is None and time.monotonic() < end:
                    self.family()  # one that was still starting may have begun another process just now
                    time.sleep(0.02)
        finally:  # also when a second Ctrl-C does not wait
            for process in self.family():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
            self.process.stdout.close()
            self._folder.cleanup()


def interpreter(checkout: Path | None) -> str:
    """The Python of another checkout, or of this process. Raises BenchmarkError for a checkout without an environment."""
    if checkout is None:
        return sys.executable
    python = checkout.resolve() / ".venv" / "bin" / "python"
    if not python.exists():
        raise BenchmarkError(f"checkout {checkout} has no .venv/bin/python; run ./apply_patches.sh there")
    return str(python)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
