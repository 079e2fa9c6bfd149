"""Starts `python -m sagellm.serve` as users do, and proves at its end that nothing is left of it."""

import ssl
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import DefaultHttpxClient, OpenAI

from benchmarks import processes
from benchmarks.processes import free_port, wait_until

READY_S = 90.0
KEY = "key-of-the-tests"
# Servers of tests speak plain HTTP. By default each client would read all certificates of the machine, which takes 30 ms.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def plain_client() -> DefaultHttpxClient:
    return DefaultHttpxClient(verify=NO_CERTIFICATES)


class ServerProcess(processes.ServerProcess):
    """`python -m sagellm.serve` with these options. Nothing is awaited before `ready`."""

    own_files = ("sagellm-", "pymp-")

    def __init__(self, folder: Path, *options: object, env: Mapping[str, str] | None = None) -> None:
        port = free_port()
        super().__init__([sys.executable, "-m", "sagellm.serve", "--port", port, "--json", *options], port, folder, env=env)

    def ready(self, deadline_s: float = READY_S) -> "ServerProcess":
        self.model = super().ready(deadline_s)["model"]
        return self

    def engine_process(self) -> psutil.Process:
        """The child that loads the model."""
        return wait_until("an engine process", lambda: processes.engine_processes(self.family()))[-1]

    def client(self, key: str = KEY) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, http_client=plain_client())

    def post(self, path: str, body: Any, key: str | None = KEY, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        options["content" if isinstance(body, (bytes, str)) else "json"] = body
        headers |= {"Content-Type": "application/json"} | options.pop("headers", {})
        return httpx.post(self.url + path, headers=headers, timeout=60, verify=NO_CERTIFICATES, **options)

    def wait_for_metric(self, what: str, holds: Callable[[float], bool], name: str, **labels: str) -> None:
        wait_until(what, lambda: holds(self.metric(name, **labels)))

    def wait_idle(self) -> None:
        """Until no request holds a block."""
        self.wait_for_metric("no active block", lambda n: n == 0, "sagellm_kv_blocks", state="active")
