"""`sagellm pd up` with real engines on a tiny model, and what its tests do to them."""

import asyncio
import contextlib
import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.processes import ServerProcess, command_line, engine_processes, free_port, metrics_of, sum_of
from sagellm.comm_backend.control import connect, sign_request
from sagellm.comm_backend.group_messages import EngineFacts, Hello
from tests.pd.harness import until

SAGELLM = (sys.executable, "-c", "from sagellm.cli import main; main()")
WAIT_S = 80.0  # for an engine that is started again, on a busy machine too
LEASE_S, TIMEOUT_S = 120.0, 10.0  # blocks that come back within seconds have not waited for the end of their lease


class Engines:
    """The answers and reports of a prefill and a decode engine. The engines have no prefix cache."""

    prefill: str
    decode: str

    # ---- requests

    def single(self, path: str, body: dict) -> httpx.Response:
        """Return the answer of one engine: the one that decodes, asked directly. It computes all itself."""
        return httpx.post(self.decode + path, json=body, timeout=60)

    def expected(self, prompt: str, num: int = 8) -> list[int]:
        return tokens_of(self.single("/v1/completions", body_of(prompt, num)))

    # ---- what they say

    def metric(self, url: str, name: str, **labels: str) -> float:
        """Sum over the samples whose labels include these."""
        return sum_of(metrics_of(url), name, **labels)

    def arrived(self, outcome: str = "done") -> float:
        return self.metric(self.decode, "sagellm_pd_requests_total", side="arrivals", outcome=outcome)

    def arriving(self) -> float:
        return self.metric(self.decode, "sagellm_pd_running", side="arrivals")

    def is_idle(self) -> bool:
        """No engine holds a block for anybody."""
        with contextlib.suppress(OSError):
            return not any(
                self.metric(url, "sagellm_kv_blocks", state="active") + self.metric(url, "sagellm_pd_running")
                for url in (self.prefill, self.decode)
            )
        return False


class RealGroup(Engines, ServerProcess):
    """One prefill and one decode engine behind their proxy. Nothing is awaited before `ready`. `flags`: of both engines."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        port = free_port()
        options = json.dumps({"folder": str(folder)})
        command = [
            *SAGELLM, "pd", "up", "--log-level", "INFO", "--port", str(port), "--json", "--policy", "always-split",
            "--wait-s", str(WAIT_S), "--model", str(model), "--", "--model-name", "tiny", "--device", "cpu", "--threads", "1",
            "--block-size", "16", "--kv-blocks", "320", "--max-batch-size", "8", "--no-prefix-caching",
            "--kv-channel", "tests.pd.held_channel:HeldShm", "--kv-channel-options", options,
            "--pd-timeout-s", str(TIMEOUT_S), "--pd-lease-s", str(LEASE_S), *flags,
        ]  # fmt: skip
        ServerProcess.__init__(self, command, port, folder)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def ready(self) -> "RealGroup":
        self.prefill, self.decode = (one["url"].removesuffix("/v1") for one in super().ready()["engines"])
        self.key = next(self.tmp.glob("sagellm-pd-*/key")).read_bytes()
        return self

    def close(self) -> None:
        self.kill()
        self.http.close()

    # ---- processes

    def child(self, *words: str) -> psutil.Process:
        """The process of the group whose command has these words."""
        def found() -> list[psutil.Process]:
            children = psutil.Process(self.process.pid).children()
            return [one for one in children if set(words) <= set(command_line(one).split())]

        return until(f"a process {words}", found)[-1]

    def server(self, role: str) -> psutil.Process:
        return self.child("--role", role)

    def engine(self, role: str) -> psutil.Process:
        """The process below the server that has the model."""
        return engine_processes(self.server(role).children())[0]

    # ---- requests

    def complete(self, prompt: str, num: int = 8, **fields) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body_of(prompt, num, **fields), timeout=90)

    def signed(self, method: str, path: str, document: dict | None = None) -> httpx.Response:
        content = b"" if document is None else json.dumps(document).encode()
        headers = sign_request(self.key, method, path, content) | {"content-type": "application/json"}
        return self.http.request(method, path, content=content, headers=headers)

    # ---- what they say

    def status(self) -> dict[str, dict]:
        return {one["engine_id"]: one for one in self.signed("GET", "/pd/status").json()["engines"]}

    def is_whole(self) -> bool:
        """Both engines have joined, and one loads from the other."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            return self.status().get(self.decode, {}).get("connected") == [self.prefill]
        return False

    def control(self, url: str) -> str:
        path = "/sage/pd/info"
        return httpx.get(url + path, headers=sign_request(self.key, "GET", path, b"")).json()["control"]

    async def facts(self, url: str) -> EngineFacts:
        connection = await connect(self.control(url), self.key)
        try:
            return await connection.call(Hello(engine_id="test"), 5, EngineFacts)
        finally:
            await connection.close()

    # ---- trouble

    @contextlib.contextmanager
    def held(self):
        """Transfers wait in their middle; yields a function that waits until one does."""
        hold, began = self.folder / "hold", self.folder / "began"
        began.unlink(missing_ok=True)
        hold.touch()
        try:
            yield lambda: until("a transfer waits", began.exists)
        finally:
            hold.unlink(missing_ok=True)


class Stream:
    """A streamed completion, read on a thread. `error`: of the last event. `broken`: how the connection ended, if it did."""

    def __init__(self, group: RealGroup, prompt: str, num: int, **fields) -> None:
        self.tokens: list[int] = []
        self.error, self.is_done, self.broken = "", False, ""
        self._has_left = False
        self._socket: socket.socket | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(group, body_of(prompt, num, stream=True, **fields)))
        self._thread.start()

    def _read(self, group: RealGroup, body: dict) -> None:
        try:
            with httpx.stream("POST", f"{group.url}/v1/completions", json=body, timeout=60) as answer:
                self._socket = answer.extensions["network_stream"].get_extra_info("socket")
                for line in answer.iter_lines():
                    self._take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            if not self._has_left:
                self.broken = f"{type(error).__name__}: {error}"
        finally:
            self._begun.set()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
        elif data:
            event = json.loads(data)
            if "error" in event:
                self.error = event["error"]["message"]
            elif tokens := event["choices"][0]["gen_tokens"]:
                self.tokens += tokens
                self._begun.set()

    def begun(self) -> "Stream":
        assert self._begun.wait(30) and self.tokens, (self.error, self.broken)
        return self

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def leave(self) -> None:
        """At once, also where nothing more would come for a while."""
        until("the answer begins", lambda: self._socket is not None)
        self._has_left = True
        self._socket.shutdown(socket.SHUT_RDWR)
        self.end()

    def end(self) -> "Stream":
        self._thread.join(60)
        assert not self._thread.is_alive(), "it hangs"
        return self


def body_of(prompt: str, num: int, **fields) -> dict:
    known = {"model": "tiny", "prompt": prompt, "max_tokens": num, "temperature": 0, "ignore_eos": True}
    return known | {"return_token_ids": True} | fields


def chat_of(prompt: str, **fields) -> dict:
    known = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": 12, "temperature": 0}
    return known | {"return_token_ids": True} | fields


def tokens_of(answer: httpx.Response) -> list[int]:
    """Return the tokens of the answer. Its text will not do, as it may end within a character; that of a random model often
    does. LMDeploy's server then leaves out the whole piece that came last."""
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["gen_tokens"]


def choice_tokens(choice: dict) -> list[int]:
    return choice.get("message", choice)["gen_tokens"]


def streamed_by(client: Any, path: str, body: dict) -> tuple[list[int], str | None]:
    """(tokens, finish reason) of a streamed answer. `client`: one of httpx, or httpx itself with a whole URL."""
    tokens, finish = [], None
    with client.stream("POST", path, json=body | {"stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("delta", choice).get("gen_tokens") or []
                    finish = choice["finish_reason"] or finish
    return tokens, finish


def run(work):
    return asyncio.run(asyncio.wait_for(work, 60))
