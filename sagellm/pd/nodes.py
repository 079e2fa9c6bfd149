"""LMDeploy's DistServe proxy application, with our group behind its registry and our relay behind its completions."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request
from lmdeploy.pytorch.disagg.config import EngineRole
from lmdeploy.serve.openai.api_server import VariableInterface, check_api_key
from lmdeploy.serve.proxy import proxy as lmdeploy_proxy
from starlette.responses import JSONResponse, Response

from sagellm.comm_backend.control import check_request
from sagellm.core.errors import PeerError, SageError
from sagellm.pd.engine import Engine
from sagellm.pd.group import Group, NotTheOne
from sagellm.pd.relay import Relay
from sagellm.serve.routes import CHAT, COMPLETION

__all__ = ["GroupNodes", "SignedNodes", "build_app"]

logger = logging.getLogger("sagellm.pd")

ROLES = {"prefill": EngineRole.Prefill, "decode": EngineRole.Decode, "hybrid": EngineRole.Hybrid}
ADD, STATUS, METRICS = "/nodes/add", "/pd/status", "/metrics"
# LMDeploy's own of these paths give way. Its `/distserve/*` are for its own connections, which nothing here has.
REPLACED = {CHAT, COMPLETION, ADD, STATUS, METRICS, "/health", "/distserve/connection_warmup", "/distserve/gc"}
MAX_NODE_BYTES = 1 << 20


class GroupNodes(lmdeploy_proxy.NodeManager):
    """LMDeploy's node registry: the engines of a group, as `GET /nodes/status` and `GET /v1/models` show them.

    `config_path`: where it keeps the registered URLs, which a proxy that is started again reads.
    """

    def __init__(self, group: Group, config_path: Path) -> None:
        super().__init__(config_path=str(config_path), serving_strategy="DistServe")
        self.known_urls = list(self.nodes)
        self.nodes = {}
        self._group = group
        self._loop: asyncio.AbstractEventLoop | None = None

    def remove_stale_nodes_by_expiration(self) -> None:
        """Do nothing, every 90 s on LMDeploy's thread: the group notices dead engines within seconds."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop on which the group runs."""
        self._loop = loop

    def changed(self, engine: Engine, is_there: bool) -> None:
        """The group's `on_change`."""
        if is_there:
            status = lmdeploy_proxy.Status(role=ROLES[engine.facts.role], models=[engine.info.model])
            self.nodes[engine.url] = status
            self.update_config_file()
        else:
            self.nodes.pop(engine.url, None)  # not out of the file: it may come back, also to another proxy

    def remove(self, node_url: str) -> None:
        """An engine has said that it leaves. From any thread but the loop's."""
        self.nodes.pop(node_url, None)
        self.update_config_file()
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._group.leave(node_url, "it has said so"), self._loop).result(10)

    @property
    def model_list(self) -> list[str]:
        """Each once, where LMDeploy's names it for each node."""
        return sorted({name for status in list(self.nodes.values()) for name in status.models})

    def begin(self, node_url: str) -> float:
        if node_url in self.nodes:
            self.nodes[node_url].unfinished += 1
        return time.time()

    def end(self, node_url: str, begun: float) -> None:
        self.post_call(node_url, begun)


class SignedNodes:
    """ASGI middleware: who changes the registry has the key of the group; who has it needs no API key."""

    def __init__(self, app: Any, key: bytes) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith(("/nodes/", "/pd/")):
            await self._app(scope, receive, send)
            return
        body, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body.append(message.get("body", b""))
            size += len(body[-1])
            more = message.get("more_body", False) and size <= MAX_NODE_BYTES
        content = b"".join(body)
        query = scope.get("query_string", b"").decode("latin-1")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            check_request(self._key, scope["method"], f"{path}?{query}" if query else path, content, headers)
        except PeerError as error:
            if path not in ("/nodes/status", STATUS):
                words = f"{path}: {error} Engines are to have the same --pd-key-file as the proxy."
                await JSONResponse({"error": words}, 401)(scope, receive, send)
                return
        else:
            scope = {**scope, "headers": [*_without_authorization(scope["headers"]), *_authorization()]}
        given = {"type": "http.request", "body": content, "more_body": False}
        pending = [given]

        async def replay() -> dict:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)


def build_app(nodes: GroupNodes, group: Group, relay: Relay, describe: Any, api_keys: list[str]) -> FastAPI:
    """LMDeploy's application, of which there is one a process, on our registry.

    `describe()`: more for `GET /pd/status`.
    """
    app = lmdeploy_proxy.app
    old = lmdeploy_proxy.node_manager
    if old is not nodes:
        old.nodes, old.cache_status = {}, False  # its thread has nothing to look at and writes no file from now on
    lmdeploy_proxy.node_manager = nodes
    VariableInterface.api_keys = api_keys or None
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in REPLACED]
    app.user_middleware[:] = [each for each in app.user_middleware if each.cls is not SignedNodes]
    app.middleware_stack = None
    app.add_middleware(SignedNodes, key=group.key)
    protected = [Depends(check_api_key)]

    @app.post(CHAT, dependencies=protected)
    async def chat() -> Any:
        """As the engines' own; see OpenAI's API."""
        return relay.response(CHAT)

    @app.post(COMPLETION, dependencies=protected)
    async def completion() -> Any:
        """As the engines' own; see OpenAI's API."""
        return relay.response(COMPLETION)

    @app.post(ADD, dependencies=protected)
    async def add(node: lmdeploy_proxy.Node) -> Any:
        """An engine joins: LMDeploy's format, signed. The group asks the engine itself for its status."""
        try:
            await group.join(node.url)
        except SageError as error:
            logger.warning("%s does not join: %s", node.url, error)
            # An engine that cannot be reached now asks again; one that is rejected ends.
            return JSONResponse({"error": str(error)}, 409 if isinstance(error, NotTheOne) else 503)
        return "Added successfully"

    @app.get(STATUS, dependencies=protected)
    async def status() -> Any:
        """Engines, pairs that exchange keys and values or do not and why, loads and costs."""
        return JSONResponse(describe() | group.status())

    @app.get("/health")
    async def health() -> Any:
        return Response(status_code=200)

    @app.get(METRICS)
    async def metrics(request: Request) -> Any:
        for role in ROLES:
            num = sum(one.facts.role == role for one in group.engines.values())
            relay.metrics.engines.labels(role).set(num)
        return Response(relay.metrics.text(), media_type="text/plain; version=0.0.4")

    return app


def _without_authorization(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [pair for pair in headers if pair[0].lower() != b"authorization"]


def _authorization() -> list[tuple[bytes, bytes]]:
    """LMDeploy's check of API keys passes those who are known by the key of the group."""
    keys = VariableInterface.api_keys
    return [(b"authorization", f"Bearer {keys[0]}".encode())] if keys else []
