"""An engine of a group makes itself known to its proxy; the proxy is an HTTP server here, and checks signatures."""

import asyncio
import re
import socket
from contextlib import asynccontextmanager

import pytest

from benchmarks.processes import free_port
from sagellm.core.config import PDHooks
from sagellm.serve import registration
from sagellm.serve.group import Membership
from sagellm.serve.registration import Registration
from tests.serve.group_proxy import GroupProxy

KEY, OTHER = b"a key of the tests", b"a key of somebody else"
URL = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(registration, "PERIOD_S", 0.02)


@asynccontextmanager
async def registering(url, key=KEY, role="decode", api_key="", trusts_proxy=False):
    hooks = PDHooks(role=role, engine_id=URL, key_file="key", channel="tcp")
    refused = asyncio.Event()
    with socket.socket() as holder:
        own = Registration(Membership(hooks, key, url, "tiny", holder, trusts_proxy), api_key, refused.set)
        own.refused = refused
        await own.start()
        try:
            yield own
        finally:
            await own.end()
            await own.end()


async def until(holds):
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 30 s")


@pytest.mark.parametrize(("role", "number"), [("hybrid", 1), ("prefill", 2), ("decode", 3)])
def test_it_comes_and_goes(proxy, role, number):
    async def main():
        there = proxy(KEY)
        async with registering(there.url, role=role, api_key="sesame"):
            await until(lambda: there.nodes)
            assert there.nodes == {URL: {"models": ["tiny"], "role": number}}
            await until(lambda: there.calls.count("GET /nodes/status") > 3)
        assert not there.nodes and there.calls.count("POST /nodes/add") == 1
        assert {each["Authorization"] for each in there.headers} == {"Bearer sesame"}

    asyncio.run(main())
    from lmdeploy.pytorch.disagg.config import EngineRole

    assert EngineRole[role.capitalize()].value == number


def test_a_proxy_that_comes_later_and_one_that_comes_back(proxy, caplog):
    async def main():
        port = free_port()
        async with registering(f"http://127.0.0.1:{port}") as own:
            await until(lambda: "cannot be reached (Connection refused); trying again every" in caplog.text)
            first = proxy(KEY, port)
            await until(lambda: first.nodes)
            first.nodes.clear()  # as after a restart, the proxy knows no engine
            await until(lambda: first.nodes)
            assert not own.refusal

    asyncio.run(main())
    assert len([record for record in caplog.records if "cannot be reached" in record.getMessage()]) == 1
    assert "registered at the proxy" in caplog.text


@pytest.mark.parametrize("trusts_proxy", [False, True])
def test_a_proxy_that_knows_it_from_before(proxy, trusts_proxy):
    """LMDeploy's own takes it for the one that was killed, until it is added again."""

    async def main():
        there = proxy(KEY)
        there.nodes[URL] = {}
        async with registering(there.url, trusts_proxy=trusts_proxy):
            await until(lambda: there.calls.count("GET /nodes/status") > 3)
        assert there.calls.count("POST /nodes/add") == trusts_proxy

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, r"\(status 401\): the signature of the request is wrong: another key"),
        ((404, {"detail": "Not Found"}), r"\(status 404\): Not Found"),
        ((403, {"error": {"message": "no room"}}), r"\(status 403\): no room"),
        ((400, ["odd"]), r"\(status 400\): \['odd'\]"),
    ],
)
def test_a_proxy_that_refuses_at_first(proxy, answer, words):
    async def main():
        there = proxy(OTHER if answer is None else KEY, answer=answer)
        async with registering(there.url) as own:
            await asyncio.wait_for(own.refused.wait(), 30)
            assert re.search(words, own.refusal), own.refusal
            assert own.refusal.startswith(f"the proxy at {there.url} refuses this engine")
            assert there.calls == ["GET /nodes/status", "POST /nodes/add"]

    asyncio.run(main())


def test_a_refusal_later_is_no_end(proxy, caplog):
    async def main():
        there = proxy(KEY)
        async with registering(there.url) as own:
            await until(lambda: there.nodes)
            there.answer = (401, {"detail": "who are you?"})
            await until(lambda: "does not take this engine (status 401): who are you?" in caplog.text)
            there.nodes.clear()
            there.answer = None
            await until(lambda: there.nodes)
            assert not own.refusal

    asyncio.run(main())


@pytest.mark.parametrize("answer", [(503, {"detail": "not now"}), (200, "Failed to add, please check the input url.")])
def test_a_proxy_that_cannot_now_is_asked_again(proxy, answer, caplog):
    async def main():
        there = proxy(KEY, answer=answer)
        async with registering(there.url) as own:
            await until(lambda: there.calls.count("POST /nodes/add") > 3)
            there.answer = None
            await until(lambda: there.nodes)
            assert not own.refusal

    asyncio.run(main())
    assert caplog.text.count("does not take this engine") == 1


def test_taking_leave_of_a_proxy_that_has_gone(proxy):
    async def main():
        there = GroupProxy(KEY)
        async with registering(there.url):
            await until(lambda: there.nodes)
            there.close()

    asyncio.run(main())
