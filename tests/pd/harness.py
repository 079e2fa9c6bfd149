"""A proxy and stand-in engines, each a process, for one test or more."""

import json
import sys
from pathlib import Path

import httpx

from benchmarks.processes import ServerProcess, free_port
from benchmarks.processes import wait_until as until
from sagellm.comm_backend.control import new_key, sign_request
from sagellm.pd.base import RouteDecision, RouteKind, RoutingPolicy

READY_S = 60.0


class Lowest(RoutingPolicy):
    """Every request to the engine that decodes and whose URL comes first, so that a test knows which one that is."""

    name = "lowest"

    def choose(self, request, engines):
        decoders = sorted(one.engine_id for one in engines if one.role != "prefill")
        return RouteDecision(RouteKind.STAY, decoders[0], None, "the first")


class TestGroup:
    """`engine(role)` starts one; `proxy` is the proxy's process."""

    __test__ = False

    def __init__(self, folder: Path, model: Path, *options: str):
        self.folder, self.model = folder, model
        self.key_file = folder / "key"
        self.key_file.touch(0o600)
        self.key_file.write_bytes(new_key())
        self.record = folder / "lines.jsonl"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", "from sagellm.cli import main; main()", "pd", "proxy", "--port", str(port),
                   "--pd-key-file", str(self.key_file), "--json", "--record", str(self.record), "--log-level", "DEBUG",
                   "--nodes-file", str(folder / "nodes.json"), *options]  # fmt: skip
        self.proxy = ServerProcess(command, port, folder / "proxy", env={"XDG_CACHE_HOME": str(folder / "cache")})
        self.engines: dict[str, ServerProcess] = {}
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def start_engine(self, role: str, *options: str) -> str:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "tests.pd.stand_in", "--role", role, "--proxy-url", self.url, "--pd-key-file",
                   str(self.key_file), "--host", "127.0.0.1", "--port", str(port), "--json", "--model", str(self.model),
                   "--model-name", "m", *options]  # fmt: skip
        self.engines[url] = ServerProcess(command, port, self.folder / f"{role}-{port}")
        return url

    def signed(self, method: str, path: str, body: bytes = b"", key: bytes | None = None) -> httpx.Response:
        key = key or self.key_file.read_bytes()
        headers = sign_request(key, method, path, body) | {"content-type": "application/json"}
        return self.http.request(method, path, content=body, headers=headers)

    def status(self) -> dict:
        return self.signed("GET", "/pd/status").json()

    def connected(self, num: int, pairs: int) -> None:
        def there() -> bool:
            engines = self.status()["engines"]
            return len(engines) == num and sum(len(one["connected"]) for one in engines) == pairs

        until(f"{num} engines, {pairs} pairs", there, READY_S)

    def lines(self, event: str) -> list[dict]:
        found = [json.loads(line) for line in self.record.read_text().splitlines()]
        return [line for line in found if line["event"] == event]

    def seen(self, url: str) -> list[dict]:
        return httpx.get(f"{url}/seen", timeout=60).json()

    def complete(self, prompt: str = "hello", **fields) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 4} | fields)

    def metric(self, name: str, **labels: str) -> float:
        return self.proxy.metric(name, **labels)

    def close(self) -> None:
        self.http.close()
        for engine in self.engines.values():
            engine.kill()
        self.proxy.end()
