"""A server under test, started from a configuration, with this checkout's code or another one's."""

import contextlib
import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.errors import BenchmarkError
from benchmarks.processes import ROOT, ServerProcess, free_port
from sagellm.core.config import SageConfig


class Server(ServerProcess):
    """`python -m sagellm.serve` on a free port of the loopback.

    `checkout` names another checkout of the project, whose `.venv` and code are used instead of this one's.
    """

    def __init__(self, config: SageConfig, checkout: Path | None = None) -> None:
        port = free_port()
        self._config = tempfile.TemporaryDirectory(prefix="sagellm-benchmark-")
        values = config.model_dump(mode="json", exclude_unset=True) | {"host": "127.0.0.1", "port": port}
        file = Path(self._config.name) / "server.yaml"
        file.write_text(yaml.safe_dump(values))
        self.api_key = config.api_key[0] if config.api_key else None
        command = [interpreter(checkout), "-m", "sagellm.serve", "--config", file, "--json"]
        super().__init__(command, port, cwd=(checkout or ROOT).resolve())

    def forget_peak_memory(self) -> None:
        """Start counting peaks anew (Linux: 5 into clear_refs)."""
        for process in self.family():
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def peak_memory_bytes(self) -> int:
        """Return the sum over the processes of the largest resident set since the last `forget_peak_memory`."""
        total = 0
        for process in self.family():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                total += next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        return total

    def kill(self) -> None:
        super().kill()
        self._config.cleanup()


def interpreter(checkout: Path | None) -> str:
    """Return the Python of another checkout, or of this process. Raises BenchmarkError for a checkout without one."""
    if checkout is None:
        return sys.executable
    python = checkout.resolve() / ".venv" / "bin" / "python"
    if not python.exists():
        raise BenchmarkError(f"checkout {checkout} has no .venv/bin/python; run ./apply_patches.sh there")
    return str(python)
