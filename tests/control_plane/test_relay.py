"""One request to a group, without a process: how long it waits, whose fault its end is, and engines that hang."""

import asyncio
import contextlib
import errno
import json
from types import SimpleNamespace

import httpx
import pytest

from sagellm.control_plane.base import EngineState
from sagellm.control_plane.config import ManagerConfig
from sagellm.control_plane.fleet import Fleet
from sagellm.control_plane.gateway import Gateway
from sagellm.control_plane.kinds.group import PDGroup
from sagellm.control_plane.metrics import GatewayMetrics
from sagellm.control_plane.relay import GatewayResponse
from sagellm.control_plane.routers.least_load import LeastLoad
from sagellm.core.errors import ConfigError
from sagellm.core.ports import listen
from tests.pd.below import KEY, Below, soon

PATH = "/v1/completions"


def counted(gateway, name, **labels):
    return gateway.fleet.metrics.registry.get_sample_value(f"sagellm_proxy_{name}_total", labels)


class Client:
    """Sends one request. `fails`: what its connection raises from its first byte on."""

    def __init__(self, gateway, body=None, fails=None):
        self._body, self._fails = json.dumps(body or {"model": "m", "prompt": "a b c", "max_tokens": 2}).encode(), fails
        self._arrived = False
        self.status, self.content = 0, b""
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": []}
        self.done = asyncio.create_task(gateway(scope, self._receive, self._send))

    async def _receive(self):
        if self._arrived:
            await asyncio.Event().wait()
        self._arrived = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message):
        if self._fails is not None:
            raise self._fails
        self.status = message.get("status", self.status)
        self.content += message.get("body", b"")


@contextlib.asynccontextmanager
async def playing(folder, *engines, wait_s=0.2, **options):
    """The gateway of a proxy which these engines have joined."""
    key_file = folder / "key"
    key_file.touch(0o600)
    key_file.write_bytes(KEY)
    fleet, listener = Fleet(LeastLoad(), GatewayMetrics(), 0.05), listen("127.0.0.1", 0)
    await fleet.start()
    try:
        kind = PDGroup(prefill=0, decode=0, policy="never-split", key_file=key_file, **options)
        await fleet.register("pd", kind)
        for one in engines:
            await one.start()
            await kind.add(one.url)
        yield Gateway(fleet, ManagerConfig(wait_s=wait_s), listener, "control")
    finally:
        await fleet.stop()
        listener.close()
        for one in engines:
            await one.close()


def test_a_request_waits_for_engines_no_longer_than_once(tmp_path):
    """Each attempt of a request may find no engine. The request gets an error when the time of all attempts is over."""

    async def waits():
        async with playing(tmp_path) as gateway:
            response = GatewayResponse(gateway, PATH, None)
            return [(await response._candidates("m", set()), response._waited_s) for _ in range(2)]

    first, second = asyncio.run(waits())
    assert first[0][0] == second[0][0] == 503 and "within 0.2 s" in second[0][1] and "no engine has joined" in second[0][1]
    assert first[1] == second[1] >= 0.2


@pytest.mark.parametrize("is_clients", [False, True])
def test_only_what_a_client_does_not_take_is_its_leaving(tmp_path, is_clients):
    """Any other error of the system is the proxy's own, and is told to its operator: here a file that cannot be opened."""
    def of(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    async def play():
        async with playing(tmp_path, *([] if is_clients else [Below("decode")])) as gateway:
            gateway.fleet.engines["pd"].kind.tokens = SimpleNamespace(of=of)
            client = Client(gateway, fails=ConnectionResetError() if is_clients else None)
            with contextlib.nullcontext() if is_clients else pytest.raises(OSError, match="Too many open files"):
                await asyncio.wait_for(client.done, 20)
            return [counted(gateway, "requests", outcome=outcome) for outcome in ("client left", "failed")]

    assert asyncio.run(play()) == ([1, None] if is_clients else [None, 1])


def test_requests_of_an_engine_that_hangs_are_sent_again_or_told(tmp_path, monkeypatch):
    """A request whose client was shown nothing goes to another engine. A stream ends with words.

    No client waits for the engine.
    """
    monkeypatch.setattr("sagellm.control_plane.engine.FIRST_BACKOFF_S", 600.0)

    async def play():
        first, second = Below("decode"), Below("decode")
        async with playing(tmp_path, first, wait_s=20.0, silent_s=1.0) as gateway:
            streamed = Client(gateway, {"model": "m", "prompt": "a b c", "stream": True})
            await soon("its first token", lambda: streamed.content)
            whole = Client(gateway)
            await soon("both have come to it", lambda: first.num_requests == 2)
            await second.start()
            try:
                second.instance = "two"
                second.goes_on.set()
                await gateway.fleet.engines["pd"].kind.add(second.url)
                first.is_silent = True
                for each in (streamed, whole):
                    await asyncio.wait_for(each.done, 20)
            finally:
                await gateway.fleet.unregister("pd-decode-2", 0.0)
                await second.close()
            assert whole.status == 200 and json.loads(whole.content) == {"choices": [{"text": "two"}]}
            text = streamed.content.decode()
            assert streamed.status == 200 and "does not answer any more" in text and "[DONE]" not in text
            assert second.num_requests == 1 and counted(gateway, "retries", cause="hangs") == 1
            assert counted(gateway, "failures", side="decode", cause="mid-stream") == 1
            assert [counted(gateway, "requests", outcome=outcome) for outcome in ("served", "broken")] == [1, 1]
            engine = gateway.fleet.engines["pd-decode-1"]
            assert engine.state is EngineState.FAILED
            first.is_silent = False  # it registers again, and is not left alone for the pause
            await gateway.fleet.engines["pd"].kind.add(first.url)
            await soon("its return", lambda: engine.state is EngineState.READY)

    asyncio.run(play())


def test_an_engine_that_comes_takes_what_the_only_one_has_failed(tmp_path):
    """The request is not sent to the one that failed again and again meanwhile."""

    async def play():
        first, second = Below("decode"), Below("decode")
        first.fails = True
        async with playing(tmp_path, first) as gateway:
            client = Client(gateway)
            await soon("its first attempt", lambda: first.num_requests)
            second.instance = "two"
            await second.start()
            second.goes_on.set()
            try:
                await gateway.fleet.engines["pd"].kind.add(second.url)
                await asyncio.wait_for(client.done, 20)
            finally:
                await gateway.fleet.unregister("pd-decode-2", 0.0)
                await second.close()
            assert client.status == 200 and json.loads(client.content) == {"choices": [{"text": "two"}]}

    asyncio.run(play())


def test_engines_of_several_models(tmp_path):
    async def play():
        engines = [Below("decode", model=model) for model in ("m", "n")]
        async with playing(tmp_path, *engines) as gateway:
            for one in engines:
                one.goes_on.set()
            await soon("both models", lambda: set(gateway.fleet.models()) == {"m", "n"})
            statuses = []
            for model in ("n", "n", "m", "o"):
                client = Client(gateway, {"model": model, "prompt": "a"})
                await asyncio.wait_for(client.done, 20)
                statuses.append(client.status)
            assert statuses == [200, 200, 200, 404] and "served are m, n" in client.content.decode()
            assert [one.num_requests for one in engines] == [1, 2]

    asyncio.run(play())


def test_a_proxy_that_is_started_again_attaches_the_engines_of_its_file(tmp_path):
    """They do not register again here."""
    file = tmp_path / "nodes.json"

    async def play():
        engine, left = Below("decode"), Below("decode")
        async with playing(tmp_path, left, nodes_file=file) as gateway:
            kind = gateway.fleet.engines["pd"].kind
            await engine.start()
            await kind.add(engine.url)
            await kind.remove(left.url)
        async with playing(tmp_path, nodes_file=file) as gateway:
            await soon("its return", lambda: gateway.fleet.engines["pd"].kind.decoders() == [engine.url])
        await engine.close()

    asyncio.run(play())
    for text in ("{", "[]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="nodes file .* Remove it"):
            PDGroup(prefill=0, decode=0, key_file=tmp_path / "key", nodes_file=file)


def test_an_engine_that_comes_before_its_group_is_not_sent_away(tmp_path):
    """It ends where it is refused, and asks again where it is told that this may change."""

    async def play():
        async with playing(tmp_path) as gateway:
            transport = httpx.ASGITransport(gateway)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
                found = []
                for gateway.fleet.is_started in (False, True):
                    found.append((await http.post("/nodes/add", json={"url": "http://127.0.0.1:1"})).status_code)
                return found

    assert asyncio.run(play()) == [503, 401]
