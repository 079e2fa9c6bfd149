"""One request, without a process: how long it waits, whose fault its end is, and engines that hang."""

import asyncio
import contextlib
import errno
import json
from types import SimpleNamespace

import pytest

from sagellm.pd.bodies import Body
from sagellm.pd.group import Group
from sagellm.pd.proxy_metrics import ProxyMetrics, RequestLines
from sagellm.pd.relay import Relay, RelayOptions
from sagellm.pd.routing import Router, find_policy
from tests.pd.below import KEY, Below, soon

PATH = "/v1/completions"


def relay_of(group, tokens=None, wait_s=0.2):
    options = RelayOptions(wait_s=wait_s)
    return Relay(group, Router(find_policy("never-split")), ProxyMetrics(), RequestLines(), tokens, options)


def counted(relay, name, **labels):
    return relay.metrics.registry.get_sample_value(f"sagellm_proxy_{name}_total", labels)


class Client:
    """Sends one request. `fails`: what its connection raises from its first byte on."""

    def __init__(self, relay, body=None, fails=None):
        self._body, self._fails = json.dumps(body or {"model": "m", "prompt": "a b c", "max_tokens": 2}).encode(), fails
        self._arrived = False
        self.status, self.content = 0, b""
        self.done = asyncio.create_task(relay.response(PATH)({"type": "http", "headers": []}, self._receive, self._send))

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


def test_a_request_waits_for_engines_no_longer_than_once():
    """Each of its attempts may find that there is none: it is told so when the time of all of them is over."""
    body = Body(b"{}", {"model": "m"})

    async def waits():
        group = Group(b"k" * 32)
        relay = relay_of(group)
        num_waits = 0

        async def changed(timeout_s):
            nonlocal num_waits
            num_waits += 1
            await asyncio.sleep(timeout_s)

        group.changed = changed
        response, found = relay.response(PATH), []
        for _ in range(2):
            num_waits = 0
            found.append((await response._wait_for_decoder(body, set()), num_waits))
        return found

    first, second = asyncio.run(waits())
    assert first[0][0] == second[0][0] == 503 and "within 0.2 s" in second[0][1]
    assert first[1] > 0 and second[1] == 0


@pytest.mark.parametrize("is_clients", [False, True])
def test_only_what_a_client_does_not_take_is_its_leaving(is_clients):
    """Any other error of the system is the proxy's own, and is told to whoever runs it: here a file that cannot be opened."""
    async def of(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    async def play():
        relay = relay_of(Group(KEY), None if is_clients else SimpleNamespace(of=of))
        client = Client(relay, fails=ConnectionResetError() if is_clients else None)
        with contextlib.nullcontext() if is_clients else pytest.raises(OSError, match="Too many open files"):
            await asyncio.wait_for(client.done, 20)
        return [counted(relay, "requests", outcome=outcome) for outcome in ("client left", "failed")]

    assert asyncio.run(play()) == ([1, None] if is_clients else [None, 1])


@contextlib.asynccontextmanager
async def playing(group, *engines):
    await group.start()
    try:
        for one in engines:
            await one.start()
            await group.join(one.url)
        yield
    finally:
        await group.close()
        for one in engines:
            await one.close()


def test_requests_of_an_engine_that_hangs_are_sent_again_or_told(monkeypatch):
    """One that was shown nothing goes to another engine; a stream ends with words. Nobody waits for the engine."""
    monkeypatch.setattr("sagellm.pd.group.HEALTH_S", 0.05)

    async def play():
        first, second = Below("decode"), Below("decode")
        group = Group(KEY, silent_s=1.0)
        relay = relay_of(group, wait_s=20.0)
        async with playing(group, first):
            streamed = Client(relay, {"model": "m", "prompt": "a b c", "stream": True})
            await soon("its first token", lambda: streamed.content)
            whole = Client(relay)
            await soon("both have come to it", lambda: first.num_requests == 2)
            await second.start()
            try:
                second.instance = "two"
                second.goes_on.set()
                await group.join(second.url)
                first.is_silent = True
                for each in (streamed, whole):
                    await asyncio.wait_for(each.done, 20)
            finally:
                await group.leave(second.url, "test")
                await second.close()
        assert whole.status == 200 and json.loads(whole.content) == {"choices": [{"text": "two"}]}
        text = streamed.content.decode()
        assert streamed.status == 200 and "does not answer any more" in text and "[DONE]" not in text
        assert second.num_requests == 1 and counted(relay, "retries", cause="hangs") == 1
        assert counted(relay, "failures", side="decode", cause="mid-stream") == 1
        assert [counted(relay, "requests", outcome=outcome) for outcome in ("served", "broken")] == [1, 1]

    asyncio.run(play())
