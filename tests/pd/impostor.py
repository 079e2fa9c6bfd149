"""A peer in this process that says what a test wants of itself, to a real proxy and a real decode engine."""

import asyncio
import threading

from aiohttp import web

from benchmarks.processes import free_port
from sagellm.comm_backend.control import ControlServer
from sagellm.comm_backend.group_messages import EngineFacts, Hello, PrefixChange, Subscribe


class Impostor:
    """Calls itself a prefill engine; `facts` are those of a real one but for what `forge` changes in them."""

    def __init__(self, key: bytes, facts: EngineFacts, forge) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._facts = forge(facts.model_copy(update={"engine_id": self.url, "instance": "impostor"}))
        self._key, self._port = key, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> "Impostor":
        self._thread.start()
        self._on_loop(self._start())
        return self

    def __exit__(self, *exception: object) -> None:
        self._on_loop(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _on_loop(self, work) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self) -> None:
        async def hello(connection, message):
            return self._facts

        async def subscribe(connection, message):
            return PrefixChange(is_all=True)

        self._control = ControlServer(self._key, {Hello: hello, Subscribe: subscribe})
        address = await self._control.start("127.0.0.1")
        info = {"engine_id": self.url, "role": "prefill", "control": address, "model": "tiny"}

        async def answer(_):
            return web.json_response(info)

        app = web.Application()
        app.router.add_get("/sage/pd/info", answer)
        app.router.add_get("/health", answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._control.close()
