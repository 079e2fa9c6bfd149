"""Control connections: what calls and events promise, with both sides in one event loop."""

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from pydantic import BaseModel, ConfigDict

from sagellm.comm_backend.control import MAX_FRAME_BYTES, ControlServer, connect, connection, register
from sagellm.core.errors import CapacityError, ConfigError, PeerError, PeerTimeoutError

KEY = b"a key of the tests"


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Ask(Strict):
    text: str = ""
    number: int = 0


class Answer(Strict):
    text: str


class News(Strict):
    number: int


register(News, Answer)


@asynccontextmanager
async def serving(handler, on_event=None, on_closed=None, **limits):
    """A server with a handler of `Ask`, and a connection to it."""
    server = ControlServer(KEY, {Ask: handler}, on_closed, **limits)
    address = await server.start("127.0.0.1")
    connected = await connect(address, KEY, on_event=on_event)
    try:
        yield server, address, connected
    finally:
        await connected.close()
        await server.close()


async def echo(connected, message):
    return Answer(text=message.text)


def test_calls_are_answered_each_its_own():
    async def handler(connected, message):
        await asyncio.sleep((message.number % 7) / 500)  # answers come in another order
        return Answer(text=str(message.number))

    async def main():
        async with serving(handler) as (_, _, connected):
            answers = await asyncio.gather(*(connected.call(Ask(number=number), 10, Answer) for number in range(300)))
            assert [answer.text for answer in answers] == [str(number) for number in range(300)]

    asyncio.run(main())


def test_an_error_travels_in_its_words_and_a_fault_does_not(caplog):
    async def handler(connected, message):
        raise CapacityError("no block is free") if message.number else ValueError("a secret of this process")

    async def main():
        async with serving(handler) as (_, address, connected):
            with pytest.raises(PeerError, match=f"^Ask to {address}: no block is free$"):
                await connected.call(Ask(number=1), 10)
            with pytest.raises(PeerError, match="internal error") as caught:
                await connected.call(Ask(), 10)
            assert "secret" not in str(caught.value)

    asyncio.run(main())
    assert "a secret of this process" in caplog.text


def test_a_call_has_a_deadline_and_a_late_answer_is_dropped():
    async def main():
        go = asyncio.Event()

        async def handler(connected, message):
            if message.number:
                await go.wait()
            return Answer(text=message.text)

        async with serving(handler) as (_, _, connected):
            with pytest.raises(PeerTimeoutError, match="no reply within 0.05 s"):
                await connected.call(Ask(number=1), 0.05)
            go.set()
            assert await connected.call(Ask(text="next"), 10) == Answer(text="next")

    asyncio.run(main())


def test_events_come_in_order_and_around_the_reply_as_they_were_told():
    seen = []

    async def main():
        async def handler(connected, message):
            await connected.tell(News(number=0))
            asyncio.get_running_loop().call_soon(lambda: told.append(asyncio.ensure_future(later(connected))))
            return Answer(text="")

        async def later(connected):
            for number in range(1, 50):
                await connected.tell(News(number=number))

        told = []
        async with serving(handler, on_event=lambda _, event: seen.append(event.number)) as (_, _, connected):
            await connected.call(Ask(), 10)
            assert seen == [0]
            while len(seen) < 50:
                await asyncio.sleep(0.001)
        assert seen == list(range(50))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_", "expect", "words"),
    [
        (News(number=1), None, "does not know requests of type 'News'"),
        (Ask(), News, "the reply is a Answer, not a News"),
        (Ask.model_construct(text="", number="x"), None, "cannot read this Ask: number: Input should be a valid integer"),
        (Ask(text="x" * MAX_FRAME_BYTES), None, "a message has 4194[0-9]* bytes; a frame takes 4194304"),
    ],
)
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_bad_request_is_refused_and_the_connection_lives(request_, expect, words):
    async def main():
        async with serving(echo) as (_, _, connected):
            with pytest.raises(PeerError, match=words):
                await connected.call(request_, 10, expect)
            assert await connected.call(Ask(text="still there"), 10) == Answer(text="still there")

    asyncio.run(main())


def test_a_reply_that_is_too_large_is_an_error_of_that_call():
    async def handler(connected, message):
        return Answer(text="x" * (message.number or 1))

    async def main():
        async with serving(handler) as (_, _, connected):
            with pytest.raises(PeerError, match="a frame takes 4194304"):
                await connected.call(Ask(number=MAX_FRAME_BYTES), 10)
            assert len((await connected.call(Ask(number=MAX_FRAME_BYTES - 1000), 10)).text) == MAX_FRAME_BYTES - 1000

    asyncio.run(main())


def test_who_waits_hears_at_once_that_the_peer_has_gone():
    async def main():
        ended, cancelled, begun = [], [], asyncio.Event()

        async def handler(connected, message):
            connected.peer = "an engine"
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(message.text)
                raise

        async with serving(handler, on_closed=lambda gone: ended.append((gone.peer, len(cancelled)))) as (server, _, connected):
            waiting = asyncio.ensure_future(connected.call(Ask(text="never"), 600))
            await asyncio.wait_for(begun.wait(), 60)
            await server.close()
            with pytest.raises(PeerError, match="it has closed the connection"):
                await waiting
            await connected.wait_closed()
            assert connected.is_closed
            with pytest.raises(PeerError, match="Ask to .*: it has closed the connection"):
                await connected.call(Ask(), 10)
            with pytest.raises(PeerError, match="it has closed the connection"):
                await connected.tell(News(number=1))
        assert cancelled == ["never"] and ended == [("an engine", 1)]  # after its handlers

    asyncio.run(main())


def test_a_killed_process_is_noticed_at_once():
    code = """
import asyncio, sys
from tests.comm_backend.control.test_control import Ask, KEY, ControlServer
async def main():
    server = ControlServer(KEY, {Ask: lambda connected, message: asyncio.Event().wait()})
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""

    async def main():
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            try:
                connected = await connect(process.stdout.readline().strip(), KEY)
                waiting = asyncio.ensure_future(connected.call(Ask(), 600))
                await asyncio.sleep(0.02)
                os.kill(process.pid, signal.SIGKILL)
                with pytest.raises(PeerError, match="it has"):
                    await asyncio.wait_for(waiting, 60)
                await connected.close()
            finally:
                process.kill()

    asyncio.run(main())


def test_a_peer_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(connection, "WRITE_LIMIT_S", 0.2)
    outcome = []

    async def main():
        finished = asyncio.Event()

        async def handler(connected, message):
            try:
                while True:  # 8 MiB at most are on the way in the kernel
                    await connected.tell(Answer(text="x" * 1_000_000))
            except PeerError as error:
                outcome.append(str(error))
                finished.set()
                raise

        async with serving(handler, on_event=lambda *_: None) as (_, _, connected):
            connected._writer.transport.pause_reading()
            waiting = asyncio.ensure_future(connected.call(Ask(), 60))
            await asyncio.wait_for(finished.wait(), 60)
            connected._writer.transport.abort()
            with pytest.raises(PeerError):
                await waiting

    asyncio.run(main())
    assert "has read nothing for 0.2 s, and was given up" in outcome[0]


def test_closing_does_not_wait_for_a_peer_that_does_not_read(monkeypatch):
    monkeypatch.setattr(connection, "CLOSE_LIMIT_S", 0.1)

    async def main():
        server = ControlServer(KEY, {Ask: echo})
        reached = await connect(await server.start("127.0.0.1"), KEY)
        far = server.connections
        while not far:
            await asyncio.sleep(0.001)
            far = server.connections
        far[0]._writer.transport.pause_reading()
        calls = [asyncio.ensure_future(reached.call(Ask(text="x" * 4_000_000), 60)) for _ in range(5)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(reached.close(), 60)
        assert all(isinstance(end, PeerError) for end in await asyncio.gather(*calls, return_exceptions=True))
        await asyncio.wait_for(server.close(), 60)

    asyncio.run(main())


def test_a_connection_that_its_owner_drops_stays_open():
    """Python's collector would else destroy its task in the middle, in whatever runs then."""

    async def main():
        async with serving(echo) as (server, address, _):
            await connect(address, KEY)
            await asyncio.sleep(0.05)
            gc.collect()
            await asyncio.sleep(0.05)
            assert len(server.connections) == 2

    asyncio.run(main())


def test_no_more_calls_run_than_are_allowed(monkeypatch):
    monkeypatch.setattr(connection, "MAX_RUNNING_CALLS", 2)

    async def main():
        go = asyncio.Event()

        async def handler(connected, message):
            await go.wait()
            return Answer(text="")

        async with serving(handler) as (_, _, connected):
            calls = [asyncio.ensure_future(connected.call(Ask(), 60)) for _ in range(2)]
            await asyncio.sleep(0.02)
            with pytest.raises(PeerError, match="works at 2 requests of this connection"):
                await connected.call(Ask(), 60)
            go.set()
            await asyncio.gather(*calls)

    asyncio.run(main())


def test_what_cannot_be_reached_is_said_in_words():
    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(ConfigError, match=f"on 127.0.0.1 port {port}: Address already in use. Choose another port."):
                await ControlServer(KEY, {}).start("127.0.0.1", port)
            with pytest.raises(PeerTimeoutError, match="not done within 0.1 s"):
                await connect(f"127.0.0.1:{port}", KEY, timeout_s=0.1)
        with pytest.raises(PeerError, match=f"cannot connect to 127.0.0.1:{port}: Connection refused."):
            await connect(f"127.0.0.1:{port}", KEY)
        for bad in ("", "host", "host:", ":1", "host:0", "host:99999", "::1:80", "host:1x"):
            with pytest.raises(ConfigError, match="is not an address; give host:port"):
                await connect(bad, KEY)

    asyncio.run(main())


def test_two_types_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two types of messages are named Ask"):
        register(type("Ask", (Strict,), {}))


def test_segments_are_sent_at_once():
    async def main():
        async with serving(echo) as (server, _, connected):
            await connected.call(Ask(), 10)
            for end in (connected, *server.connections):
                assert end._writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(main())


def test_logs_name_the_peer(caplog):
    caplog.set_level(logging.WARNING)

    async def main():
        server = ControlServer(KEY, {Ask: echo})
        address = await server.start("127.0.0.1")
        with pytest.raises(PeerError, match="another key"):
            await connect(address, b"the key of others")
        await server.close()

    asyncio.run(main())
    assert len(caplog.records) == 1 and "refused: it does not have the key." in caplog.text and "127.0.0.1:" in caplog.text
