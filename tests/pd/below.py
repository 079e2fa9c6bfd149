"""An engine and its server in this process, for a group in this process: what it is asked, and what it leaves unanswered."""

import asyncio
import json
import time

from aiohttp import web

from sagellm.comm_backend.control import ControlServer, new_key
from sagellm.comm_backend.group_messages import Capabilities, Connect, Done, EngineFacts, Hello, PrefixChange, Subscribe
from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVPart
from sagellm.comm_backend.kv_transfer.plan import TransferEndpoint
from sagellm.core.errors import PeerError

KEY = new_key()
PART = KVPart(name="keys", num_heads=1, width=4, dtype="float32")
LAYOUT = KVLayout(num_layers=1, num_blocks=4, block_size=4, total_heads=1, parts=(PART,))


class Below:
    """`is_silent`: its engine answers nothing. `fails`: a completion answers 503. `refuses`: what it says to `Connect`; where
    it `hangs` it says nothing to that. `connects`: when it was asked to. A completion streams one event and waits for
    `goes_on`, both of which a body without "stream" waits for."""

    is_silent = hangs = fails = False
    refuses = ""
    capabilities = Capabilities()

    def __init__(self, role="hybrid", weights="w", num_layers=1, model="m"):
        self.role, self.weights, self.model, self.instance = role, weights, model, "one"
        self.layout = LAYOUT.model_copy(update={"num_layers": num_layers})
        self.connects, self.num_requests = [], 0

    async def start(self):
        handlers = {Hello: self._hello, Subscribe: self._subscribe, Connect: self._connect}
        self.goes_on = asyncio.Event()
        self._control = ControlServer(KEY, handlers, lambda _: None)
        self.address = await self._control.start("127.0.0.1", 0)
        app = web.Application()
        app.add_routes([
            web.get("/sage/pd/info", self._info), web.get("/health", self._health),
            web.post("/v1/completions", self._completion),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def close(self):
        await self._control.close()
        await self._runner.cleanup()

    async def _info(self, _):
        return web.json_response({"engine_id": self.url, "role": self.role, "control": self.address, "model": self.model})

    async def _health(self, _):
        return web.Response()

    async def _completion(self, request):
        body = await request.json()
        self.num_requests += 1
        if self.fails:
            return web.json_response({"error": "not now"}, status=503)
        event = b"data: " + json.dumps({"choices": [{"text": self.instance}]}).encode() + b"\n\n"
        if not body.get("stream"):
            await self.goes_on.wait()
            return web.Response(body=event[6:], content_type="application/json")
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(event)
        await self.goes_on.wait()
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _hello(self, _, message):
        if self.is_silent:
            await asyncio.sleep(60)
        endpoint = TransferEndpoint(channel="shm", layout=self.layout, address={})
        return EngineFacts(
            engine_id=self.url, instance=self.instance, role=self.role, model=self.model, weights=self.weights,
            channel="shm", endpoints=(endpoint,), block_size=4, num_blocks=4, token_bytes=16, timeout_s=10.0,
            capabilities=self.capabilities,
        )  # fmt: skip

    async def _subscribe(self, *_):
        return PrefixChange(stored=(), is_all=True)

    async def _connect(self, *_):
        self.connects.append(time.monotonic())
        if self.hangs:
            await asyncio.sleep(60)
        if self.refuses:
            raise PeerError(self.refuses)
        return Done()


async def soon(what, answer, deadline_s=20.0):
    """The first true answer, while the loop runs; a deadline that passes is a failure."""
    end = time.monotonic() + deadline_s
    while not (value := answer()):
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.01)
    return value
