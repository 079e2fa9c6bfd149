"""The proxy process: `sagellm pd proxy`."""

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any, Literal

import uvicorn
from pydantic import Field

from sagellm.comm_backend.control import read_key
from sagellm.core.config import Model
from sagellm.core.early import STOP_SIGNALS
from sagellm.core.errors import ConfigError, SageError
from sagellm.core.ports import SagePorts, listen
from sagellm.pd.costs import OnlineCosts
from sagellm.pd.group import SILENT_S, Group
from sagellm.pd.proxy_metrics import ProxyMetrics, RequestLines
from sagellm.pd.relay import Relay, RelayOptions
from sagellm.pd.routing import Router, find_policy
from sagellm.pd.tokens import PromptTokens
from sagellm.serve.logs import claim_stdout, log_to_stderr

__all__ = ["ProxyConfig", "run_proxy"]

logger = logging.getLogger("sagellm.pd")


class ProxyConfig(Model):
    """Settings of one proxy.

    Attributes:
        key_file: the secret of the group.
        model: folder of the tokenizer; without it prompts are routed by load alone.
        policy: a name of `policy_names`, or `module:Class`.
        wait_s: longest that a request waits for an engine that decodes.
        silent_s: an engine that answers nothing for so long, though its server does, hangs; longer than its longest step.
        nodes_file: keeps the URLs of engines for a proxy that is started again; None: a file that goes with the process.
        listen_fd: a socket that listens already, from the parent process.
    """

    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(SagePorts.proxy, ge=1, le=65535)
    key_file: Path
    model: Path | None = None
    api_key: tuple[str, ...] = ()
    policy: str = "pd"
    wait_s: float = Field(30.0, ge=0, le=3600)
    silent_s: float = Field(SILENT_S, ge=1, le=86400)
    record: Path | None = None
    nodes_file: Path | None = None
    listen_fd: int | None = Field(None, ge=0)
    drain_timeout_s: float = Field(10.0, ge=0)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


def run_proxy(config: ProxyConfig, as_json: bool = False) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Raises:
        SageError: before anything was started: no key, port in use, unknown policy, no tokenizer.
    """
    key = read_key(config.key_file)
    policy = find_policy(config.policy)
    if config.model is not None and not config.model.is_dir():
        raise ConfigError(f"--model {config.model} is no folder; give the folder of the model that the engines serve.")
    given = config.listen_fd
    listener = listen(config.host, config.port) if given is None else socket.socket(fileno=os.dup(given))
    log_to_stderr(config.log_level)
    lines = RequestLines(config.record)
    folder = Path(tempfile.mkdtemp(prefix="sagellm-proxy-"))
    out = claim_stdout()
    try:
        tokens = None if config.model is None else PromptTokens(config.model)
        if tokens is None:
            logger.warning("no tokenizer (--model): requests are routed by load alone, not by what engines have cached")
        nodes_file = config.nodes_file or folder / "nodes.json"
        return _serve(config, key, Router(policy), tokens, lines, nodes_file, listener, out, as_json)
    finally:
        lines.close()
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)


def _serve(
    config: ProxyConfig, key: bytes, router: Router, tokens: PromptTokens | None, lines: RequestLines, nodes_file: Path,
    listener: socket.socket, out: Any, as_json: bool,
) -> int:  # fmt: skip
    from sagellm.pd.nodes import GroupNodes, build_app  # LMDeploy's, and torch with it

    group = Group(key, OnlineCosts(), lambda engine, is_there: nodes.changed(engine, is_there), config.silent_s)
    nodes = GroupNodes(group, nodes_file)
    relay = Relay(group, router, ProxyMetrics(), lines, tokens, RelayOptions(wait_s=config.wait_s, registry=nodes))

    def describe() -> dict[str, Any]:
        faults = router.num_faults
        return {"policy": router.policy.name, "policy_faults": faults, "routes_by": "load and prefix" if tokens else "load"}

    app = build_app(nodes, group, relay, describe, list(config.api_key))
    level = "info" if config.log_level == "DEBUG" else "warning"
    settings = uvicorn.Config(app, log_level=level, timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)))
    for number in STOP_SIGNALS:  # uvicorn takes them over, and raises at its end what it got
        signal.signal(number, lambda *_: None)
    _Server(settings, group, nodes, lambda: _announce(config, listener, out, as_json)).run(sockets=[listener])
    return 0


class _Server(uvicorn.Server):
    def __init__(self, settings: uvicorn.Config, group: Group, nodes: Any, ready: Any) -> None:
        super().__init__(settings)
        self._group, self._nodes, self._ready = group, nodes, ready
        self._rejoining: set[asyncio.Task] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._nodes.attach(asyncio.get_running_loop())
        await self._group.start()
        for url in self._nodes.known_urls:
            task = asyncio.create_task(self._rejoin(url))
            self._rejoining.add(task)
            task.add_done_callback(self._rejoining.discard)
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)  # requests end first
        await self._group.close()

    async def _rejoin(self, url: str) -> None:
        try:
            await self._group.join(url)
        except SageError as error:
            logger.info("an engine of the proxy before this one does not join: %s", error)


def _announce(config: ProxyConfig, listener: socket.socket, out: Any, as_json: bool) -> None:
    port = listener.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{port}"
    if as_json:
        print(json.dumps({"ready": True, "url": url, "pid": os.getpid(), "policy": config.policy}), file=out, flush=True)
    else:
        print(
            f"Ready: proxy at {url}, policy {config.policy}. "
            f"Engines join with --proxy-url {url} --pd-key-file {config.key_file}",
            file=out, flush=True,
        )  # fmt: skip
