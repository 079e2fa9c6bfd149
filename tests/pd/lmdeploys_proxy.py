"""A prefill and a decode engine on a tiny model, started by hand behind LMDeploy's own proxy or ours, each a process."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from benchmarks.processes import free_port
from sagellm.comm_backend.control import new_key
from tests.pd.harness import until
from tests.pd.real_group import LEASE_S, TIMEOUT_S, Engines
from tests.serve.harness import KEY, ServerProcess


class ProxiedByLMDeploy(Engines):
    """Nothing is awaited before `ready`."""

    proxy = ("-m", "lmdeploy", "serve", "proxy", "--server-name", "127.0.0.1", "--serving-strategy", "DistServe",
             "--disable-cache-status", "--server-port")  # fmt: skip
    flags = ("--pd-trust-proxy",)

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = new_key()
        self.key_file = folder / "key"
        self.key_file.touch(0o600)
        self.key_file.write_bytes(self.key)
        self.log = folder / "proxy.log"
        command = [sys.executable, *self.proxy, str(self.port)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        self.servers = {role: self.start(role) for role in ("prefill", "decode")}
        self.prefill, self.decode = (one.url for one in self.servers.values())

    def start(self, role: str) -> ServerProcess:
        return ServerProcess(
            self.folder / role, "--role", role, "--proxy-url", self.url, "--pd-key-file", self.key_file, *self.flags,
            "--model", self.model, "--model-name", "tiny", "--device", "cpu", "--threads", "1", "--block-size", "16",
            "--kv-blocks", "320", "--max-batch-size", "8", "--no-prefix-caching", "--pd-timeout-s", TIMEOUT_S,
            "--pd-lease-s", LEASE_S,
        )  # fmt: skip

    def nodes(self) -> dict[str, int]:
        """URL -> LMDeploy's number of the role."""
        try:
            return {url: one["role"] for url, one in httpx.get(f"{self.url}/nodes/status", timeout=30).json().items()}
        except httpx.HTTPError:
            assert self.process.poll() is None, self.log.read_text()
            return {}

    def is_whole(self) -> bool:
        return self.nodes() == {self.prefill: 2, self.decode: 3}

    def ready(self) -> "ProxiedByLMDeploy":
        for server in self.servers.values():
            server.ready()
        until("both engines are registered", self.is_whole, 60)
        return self

    def end(self) -> None:
        for server in self.servers.values():
            server.send(signal.SIGTERM)
        for server in self.servers.values():
            server.end(None)

    def close(self) -> None:
        for server in self.servers.values():
            server.kill()
        self.process.kill()
        self.process.wait(10)


class ProxiedByOurs(ProxiedByLMDeploy):
    """Behind `sagellm pd proxy`. Clients, engines and proxy have one API key."""

    proxy = ("-c", "from sagellm.cli import main; main()", "pd", "proxy", "--pd-key-file", "key", "--policy", "always-split",
             "--api-key", KEY, "--port")  # fmt: skip
    flags = ("--api-key", KEY)

    def nodes(self) -> dict[str, int]:
        headers = {"Authorization": f"Bearer {KEY}"}
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{self.url}/pd/status", headers=headers, timeout=30)
            engines = answer.json()["engines"] if answer.status_code == 200 else []
            return {one["engine_id"]: one["connected"] for one in engines}
        assert self.process.poll() is None, self.log.read_text()
        return {}

    def is_whole(self) -> bool:
        return self.nodes() == {self.prefill: [], self.decode: [self.prefill]}
