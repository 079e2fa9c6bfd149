"""An engine that answers nothing any more, below a server that does."""

import asyncio

import pytest
from aiohttp import web

from sagellm.comm_backend.control import ControlServer, new_key
from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVPart
from sagellm.comm_backend.kv_transfer.plan import TransferEndpoint
from sagellm.pd.group import Group
from sagellm.pd.messages import EngineFacts, Hello, PrefixChange, Subscribe

KEY = new_key()
PART = KVPart(name="keys", num_heads=1, width=4, dtype="float32")
LAYOUT = KVLayout(num_layers=1, num_blocks=4, block_size=4, total_heads=1, parts=(PART,))


class Below:
    """An engine and its server in this process; `is_silent`: of the engine."""

    is_silent = False

    async def start(self):
        handlers = {Hello: self._hello, Subscribe: self._subscribe}
        self._control = ControlServer(KEY, handlers, lambda _: None)
        self.address = await self._control.start("127.0.0.1", 0)
        app = web.Application()
        app.add_routes([web.get("/sage/pd/info", self._info), web.get("/health", self._health)])
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self):
        await self._control.close()
        await self._runner.cleanup()

    async def _info(self, _):
        return web.json_response({"engine_id": self.url, "role": "hybrid", "control": self.address, "model": "m"})

    async def _health(self, _):
        return web.Response()

    async def _hello(self, _, message):
        if self.is_silent:
            await asyncio.sleep(60)
        endpoint = TransferEndpoint(channel="shm", layout=LAYOUT, address={})
        return EngineFacts(
            engine_id=self.url, instance="one", role="hybrid", model="m", weights="w", channel="shm", endpoints=(endpoint,),
            block_size=4, num_blocks=4, token_bytes=16, timeout_s=10.0,
        )  # fmt: skip

    async def _subscribe(self, *_):
        return PrefixChange(stored=(), is_all=True)


@pytest.mark.parametrize("falls_silent", [False, True])
def test_an_engine_that_is_silent_below_a_healthy_server_is_given_up(falls_silent, monkeypatch):
    monkeypatch.setattr("sagellm.pd.group.HEALTH_S", 0.05)

    async def play():
        below, group = Below(), Group(KEY, silent_s=0.3)
        await below.start()
        await group.start()
        try:
            engine = await group.join(below.url)
            below.is_silent = falls_silent
            for _ in range(100 if falls_silent else 12):
                await asyncio.sleep(0.05)
                if engine.hangs.is_set():
                    break
            await asyncio.sleep(0)
            return engine.hangs.is_set(), below.url in group.engines
        finally:
            await group.close()
            await below.close()

    assert asyncio.run(play()) == (falls_silent, not falls_silent)
