"""A proxy and stand-in engines, each a process, for one test or more."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from sagellm.comm_backend.control import new_key, sign_request
from sagellm.pd.base import RouteDecision, RouteKind, RoutingPolicy
from tests.host import free_port

READY_S = 60.0


def until(what, answer, deadline_s=30.0):
    """The first true answer; a deadline that passes is a failure."""
    end = time.monotonic() + deadline_s
    while not (value := answer()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)
    return value


class Lowest(RoutingPolicy):
    """Every request to the engine that decodes and whose URL comes first, so that a test knows which one that is."""

    name = "lowest"

    def choose(self, request, engines):
        decoders = sorted(one.engine_id for one in engines if one.role != "prefill")
        return RouteDecision(RouteKind.STAY, decoders[0], None, "the first")


class Proc:
    def __init__(self, folder: Path, name: str, command: list[str]):
        self.err = folder / f"{name}.err"
        self.command = command
        self.start()

    def start(self):
        with self.err.open("ab") as err:
            self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=err, text=True)

    def ready(self):
        line = self.process.stdout.readline()
        assert line, self.err.read_text()
        return json.loads(line)

    def kill(self):
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()

    def end(self, code=0):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(20) == code, self.err.read_text()
        self.process.stdout.close()


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
        command = [sys.executable, "-m", "sagellm.pd", "proxy", "--port", str(port), "--pd-key-file", str(self.key_file),
                   "--json", "--record", str(self.record), "--nodes-file", str(folder / "nodes.json"), "--log-level", "DEBUG",
                   *options]  # fmt: skip
        self.proxy = Proc(folder, "proxy", command)
        self.engines: dict[str, Proc] = {}
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def start_engine(self, role: str, *options: str) -> str:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "tests.pd.stand_in", "--role", role, "--proxy-url", self.url, "--pd-key-file",
                   str(self.key_file), "--host", "127.0.0.1", "--port", str(port), "--json", "--model", str(self.model),
                   "--model-name", "m", *options]  # fmt: skip
        self.engines[url] = Proc(self.folder, f"{role}-{port}", command)
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
        wanted = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name + (f"{{{wanted}}}" if wanted else " ")):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def close(self) -> None:
        self.http.close()
        for engine in self.engines.values():
            engine.kill()
        self.proxy.end()


