"""The gateway: the OpenAI API of all engines of a manager on one port, its control routes, and a page for people."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from sagellm.control_plane.base import BaseService
from sagellm.control_plane.config import ManagerConfig
from sagellm.control_plane.fleet import Fleet
from sagellm.control_plane.found import CONTROL_HEADER
from sagellm.control_plane.joining import NODES, STATUS, Joining
from sagellm.control_plane.lines import RequestLines
from sagellm.control_plane.probe import ROUTES
from sagellm.control_plane.ray_engine import made_engine
from sagellm.control_plane.relay import GatewayResponse
from sagellm.core.errors import ConfigError, PeerError, SageError
from sagellm.core.tasks import within
from sagellm.pd.bodies import error_body

__all__ = ["Gateway"]

PAGE = Path(__file__).with_name("ui.html")
LAST_WORDS_S = 5.0  # of streams that are ended


class Gateway(BaseService):
    """An ASGI application and its server.

    Args:
        listener: where it listens; closed at the end.
        control_key: who sends it may start and stop engines.
        lines: the record; None: the log alone.
    """

    def __init__(
        self, fleet: Fleet, config: ManagerConfig, listener: socket, control_key: str, lines: RequestLines | None = None
    ) -> None:  # fmt: skip
        self.fleet, self.config, self.lines = fleet, config, lines or RequestLines()
        self.is_closing = False
        self.num_running = self.num_begun = 0
        self._limits = config.limits()
        self._running = dict.fromkeys(self._limits, 0)
        self._listener, self._control_key = listener, control_key
        self._joining = Joining(fleet)
        self._pages = Starlette(routes=[
            Route("/health", self._health), Route("/metrics", self._metrics), Route("/ui", self._ui),
            Route("/v1/models", self._guarded(self._models)),
            Route("/control/engines", self._guarded(self._status)),
            Route("/control/engines", self._owned(self._register), methods=["POST"]),
            Route("/control/engines/{name}", self._owned(self._unregister), methods=["DELETE"]),
            Route("/control/engines/{name}/drain", self._owned(self._drain), methods=["POST"]),
            Route(STATUS, self._for_group(self._joining.status)), Route(NODES, self._for_group(self._joining.nodes)),
            *self._joining.routes(),
        ])  # fmt: skip
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task | None = None

    async def start(self) -> None:
        settings = uvicorn.Config(
            self, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=30,
            timeout_graceful_shutdown=None, server_header=False, date_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise ConfigError("the gateway's server has ended at its start.")
            await asyncio.sleep(0.002)

    async def stop(self, grace_s: float = 10.0) -> None:
        """Take no new requests; those that run may end for `grace_s` seconds. Then streams end with an error event."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        with contextlib.suppress(asyncio.TimeoutError):
            await within(asyncio.shield(self._serving), grace_s)
        self.is_closing = True
        for engine in self.fleet.engines.values():
            engine.hangs.words = "the gateway is ending"
            engine.hangs.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await within(asyncio.shield(self._serving), LAST_WORDS_S)
        self._server.force_exit = True
        await self._serving
        self._listener.close()

    async def health(self) -> str:
        return await self.fleet.health()

    def begin(self, key: str | None) -> int:
        """A request of the key begins; `GatewayResponse` calls it, and `end`. Returns its number."""
        self.num_running += 1
        self.num_begun += 1
        self.fleet.metrics.running.inc()
        if key is not None:
            self._running[key] += 1
        return self.num_begun

    def end(self, key: str | None) -> None:
        self.num_running -= 1
        self.fleet.metrics.running.dec()
        if key is not None:
            self._running[key] -= 1

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in ROUTES:
            await self._pages(scope, receive, send)
            return
        if scope["method"] != "POST":
            app = _refusal(405, f"{scope['path']} takes POST.", {"allow": "POST"})
        else:
            key, app = self._check_key(dict(scope["headers"]).get(b"authorization", b"").decode("latin-1"))
            limit = self._limits.get(key) if key is not None else None
            if app is None and limit is not None and self._running[key] >= limit:
                self.fleet.metrics.limited.inc()
                app = _refusal(429, f"{limit} requests of this key are running, its limit; wait for one of them.",
                               {"retry-after": "1"})  # fmt: skip
            app = app or GatewayResponse(self, scope["path"], key)
        await app(scope, receive, send)

    def _check_key(self, authorization: str) -> tuple[str | None, Response | None]:
        """Return the key, and a refusal where there must be one and it is not known."""
        if not self._limits:
            return None, None
        kind, _, key = authorization.partition(" ")
        if kind.lower() == "bearer" and key in self._limits:
            return key, None
        return None, _refusal(401, "the API key is missing or unknown; send Authorization: Bearer KEY.")

    def _is_owner(self, request: Request) -> bool:
        return secrets.compare_digest(request.headers.get(CONTROL_HEADER, "").encode(), self._control_key.encode())

    def _guarded(self, handler: Any) -> Any:
        """For who has an API key, if there are keys, or the control key."""

        async def checked(request: Request) -> Response:
            _, refusal = self._check_key(request.headers.get("authorization", ""))
            return await handler(request) if refusal is None or self._is_owner(request) else refusal

        return checked

    def _owned(self, handler: Any) -> Any:
        """For who has the control key: engines are programs that run as the owner of the manager."""

        async def checked(request: Request) -> Response:
            if not self._is_owner(request):
                return _refusal(403, f"only the owner of the manager may do this; send its control key in {CONTROL_HEADER}.")
            try:
                return await handler(request)
            except SageError as error:
                return _refusal(400 if isinstance(error, ConfigError) else 502, str(error))

        return checked

    async def _health(self, request: Request) -> Response:
        why = await self.health()
        return JSONResponse({"status": why or "ok"}, 503 if why else 200)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.fleet.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _ui(self, request: Request) -> Response:
        return HTMLResponse(PAGE.read_text())

    async def _models(self, request: Request) -> Response:
        models = sorted(self.fleet.models())
        rows = [{"id": name, "object": "model", "created": 0, "owned_by": "sagellm"} for name in models]
        return JSONResponse({"object": "list", "data": rows})

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self.fleet.status() | {"running": self.num_running, "decisions": list(self.fleet.decisions)[::-1]})

    def _for_group(self, answer: Callable[[], Any]) -> Any:
        """For who has an API key, if there are keys, or the key of a group."""

        async def checked(request: Request) -> Response:
            _, refusal = self._check_key(request.headers.get("authorization", ""))
            if refusal is not None:
                try:
                    await self._joining.signer(request)
                except PeerError:
                    return refusal
            return JSONResponse(answer())

        return checked

    async def _register(self, request: Request) -> Response:
        try:
            wanted = await request.json()
            name, kind, options = wanted["name"], wanted["kind"], wanted.get("options", {})
        except (ValueError, TypeError, KeyError):
            raise ConfigError('the body must be {"name": ..., "kind": ..., "options": {...}}.') from None
        if not (isinstance(name, str) and isinstance(kind, str) and isinstance(options, dict)):
            raise ConfigError("name and kind are texts, and options an object.")
        made = made_engine(kind, options, self.config.ray_address)
        engine = await asyncio.shield(self.fleet.register(name, made))
        return JSONResponse(engine.status(), 201)

    async def _unregister(self, request: Request) -> Response:
        try:
            drain_s = float(request.query_params.get("drain_s", self.config.drain_timeout_s))
        except ValueError:
            raise ConfigError("drain_s is a number of seconds.") from None
        await asyncio.shield(self.fleet.unregister(request.path_params["name"], drain_s))
        return JSONResponse({"stopped": request.path_params["name"]})

    async def _drain(self, request: Request) -> Response:
        self.fleet.drain(request.path_params["name"])
        return JSONResponse({"draining": request.path_params["name"]})


def _refusal(status: int, words: str, headers: dict[str, str] | None = None) -> Response:
    return Response(error_body(words, status), status, headers, "application/json")
