"""An OpenAI server in this process that behaves as a test wants, and the kind of engine that is a process without a model."""

import asyncio
import contextlib
import json
import sys
import threading

from aiohttp import web

from benchmarks.paced import MEDIA
from benchmarks.processes import free_port
from sagellm.control_plane.child_engine import ChildEngine
from sagellm.core.tasks import end_tasks


class Paced(ChildEngine):
    """`benchmarks.paced` as a process of the manager."""

    name = "paced"

    def __init__(self, model: str = "paced", pace_ms: float = 1.0) -> None:
        self.model, self._pace_ms = model, pace_ms

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-m", "benchmarks.paced", "--port", str(port), "--model", self.model,
                "--pace-ms", str(self._pace_ms)]  # fmt: skip


class Never(Paced):
    """A process that does not get ready."""

    def command(self, port):
        return [sys.executable, "-c", "import time; time.sleep(600)", "never ready"]


class Endpoint:
    """Serves `model` at `url` inside a `with`. `trouble` is what happens to the next requests of answers:

    status: (code, body, media type); cut: the connection ends after so many tokens; error: an error event after so many;
    hang: nothing comes, /health included; linger: the end comes so many seconds after the mark of it. `gates`: each token
    waits for one `gate()`. `seen`: bodies and headers.
    """

    def __init__(self, model="m", routes=("/v1/completions", "/v1/chat/completions"), encode=None, models=None):
        self.model, self.routes, self.encode = model, routes, encode
        self.models = {"object": "list", "data": [{"id": model}]} if models is None else models
        self.trouble, self.seen, self.num_left, self.is_gated = {}, [], 0, False
        self._gates = threading.Semaphore(0)
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.up()
        return self

    def __exit__(self, *exception):
        self.down()
        self._on_loop(end_tasks())
        self._on_loop(asyncio.sleep(0.02))  # connections that were cut are closed in the next rounds of the loop
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def up(self):
        self._on_loop(self._start())

    def down(self):
        self.trouble.pop("hang", None)
        self._on_loop(self._stop())

    def gate(self):
        self._gates.release()

    def _on_loop(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _stop(self):
        server = self._runner.server
        transports = [each.transport for each in server.connections] if server is not None else []
        await self._runner.cleanup()
        for each in filter(None, transports):
            each.abort()  # a connection with unread bytes would stay open

    async def _start(self):
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        for path in self.routes:
            app.router.add_post(path, self._embed if path.endswith("embeddings") else self._answer)
        if self.encode is not None:
            app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()

    async def _health(self, request):
        while "hang" in self.trouble:
            await asyncio.sleep(0.02)
        return web.Response()

    async def _models(self, request):
        return web.Response(text=self.models) if isinstance(self.models, str) else web.json_response(self.models)

    async def _tokenize(self, request):
        return web.json_response({"tokens": self.encode})

    async def _embed(self, request):
        return web.json_response({"data": [{"embedding": [1.0], "index": 0}]}, status=200 if await request.json() else 400)

    async def _answer(self, request):
        body = await request.json()
        if not body:
            return web.json_response({"error": {"message": "empty"}}, status=400)
        self.seen.append({"body": body, "headers": {name.lower(): value for name, value in request.headers.items()}})
        trouble = dict(self.trouble)
        if "status" in trouble:
            code, text, media = trouble["status"]
            return web.Response(status=code, text=text, content_type=media)
        try:
            while "hang" in self.trouble:
                await asyncio.sleep(0.02)
            return await self._stream(request, body, trouble)
        except (asyncio.CancelledError, ConnectionError):
            self.num_left += 1
            raise

    async def _stream(self, request, body, trouble):
        words = [f"{body['prompt']}{number}" for number in range(body.get("max_tokens", 4))]
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": " ".join(words)}], "by": self.url})
        answer = web.StreamResponse(headers=MEDIA)
        await answer.prepare(request)
        for number, word in enumerate(words):
            if trouble.get("cut") == number:
                request.transport.abort()
                return answer
            if trouble.get("error") == number:
                await answer.write(b'data: {"error":{"message":"out of memory","code":500}}\n\ndata: [DONE]\n\n')
                return answer
            while self.is_gated and not self._gates.acquire(blocking=False):
                await asyncio.sleep(0.005)
            with contextlib.suppress(ConnectionError):
                await answer.write(b"data: " + json.dumps({"choices": [{"text": word}]}).encode() + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        await asyncio.sleep(trouble.get("linger", 0))
        return answer


__all__ = ["Endpoint", "Never", "Paced"]
