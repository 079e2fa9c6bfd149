"""Bytes that no honest peer sends: nothing is executed, that connection ends, others and the server live on."""

import asyncio
import json
import random
import struct
from contextlib import asynccontextmanager

import pytest

from sagellm.comm_backend.control import MAX_FRAME_BYTES, ControlServer, connect, frames
from sagellm.core.errors import PeerError
from tests.comm_backend.control.test_control import KEY, Answer, Ask


@asynccontextmanager
async def guarded(**limits):
    """A server whose handler notes what it was asked, an honest connection, and a check that both still work at the end."""
    taken = []

    async def handler(connected, message):
        taken.append(message.text)
        return Answer(text=message.text)

    server = ControlServer(KEY, {Ask: handler}, **limits)
    address = await server.start("127.0.0.1")
    honest = await connect(address, KEY)
    try:
        yield server, address.rpartition(":")[2], taken
        assert await honest.call(Ask(text="honest"), 10) == Answer(text="honest")
        later = await connect(address, KEY)
        assert await later.call(Ask(text="later"), 10) == Answer(text="later")
        await later.close()
    finally:
        await honest.close()
        await server.close()
    assert taken[-2:] == ["honest", "later"]
    del taken[-2:]


async def told(port, content, is_end=True):
    """All that the server says to these bytes, until it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    if is_end:
        writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def call(text="attack"):
    head = json.dumps({"kind": "call", "id": 1, "type": "Ask"})
    return f"{head}\n{Ask(text=text).model_dump_json()}".encode()


@asynccontextmanager
async def admitted(port):
    """A peer that has the key, and writes whatever it likes after the handshake."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield await frames.greet(reader, writer, KEY), reader, writer
    finally:
        writer.close()


async def is_ended(reader):
    try:
        return await asyncio.wait_for(reader.read(), 60) is not None
    except ConnectionResetError:
        return True


def test_random_bytes_of_strangers():
    async def main():
        chance = random.Random(1)
        async with guarded() as (_, port, taken):
            for _ in range(200):
                content = chance.randbytes(chance.randrange(200))
                if chance.random() < 0.5:  # past the first check
                    content = frames._MAGIC + bytes([frames.PROTOCOL]) + content
                answer = await told(port, content)
                assert answer == b"" or (answer[: len(frames._MAGIC)] == frames._MAGIC and len(answer) <= 46)
        assert not taken

    asyncio.run(main())


@pytest.mark.parametrize("key", [b"another key of 16", KEY + b"x", KEY[:-1], b""])
def test_a_wrong_key_hears_no_proof(key):
    async def main():
        async with guarded() as (_, port, taken):
            with pytest.raises(PeerError, match="another key"):
                await connect(f"127.0.0.1:{port}", key)
        assert not taken

    asyncio.run(main())


def test_a_server_without_the_key_is_not_believed():
    """Also one that says that all is well, or sends back what it got."""

    async def pretend(reader, writer):
        opening = await reader.readexactly(frames._OPENING_BYTES)
        writer.write(opening)
        writer.write(b"\0" + await reader.readexactly(32))
        writer.close()

    async def main():
        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        with pytest.raises(PeerError, match="does not prove that it has the key"):
            await connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", KEY)
        server.close()
        await server.wait_closed()

    asyncio.run(main())


def test_a_handshake_that_was_listened_to_does_not_work_again():
    async def main():
        async with guarded() as (_, port, taken):
            sent = []
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            write = writer.write
            writer.write = lambda content: (sent.append(bytes(content)), write(content))
            sealed = await frames.greet(reader, writer, KEY)
            sealed.send(call("once"))
            await sealed.receive()
            answer = await told(port, b"".join(sent))
            assert answer[-1:] == frames._WRONG_KEY and len(answer) == 46
            writer.close()
        assert taken == ["once"]

    asyncio.run(main())


def _sealed(sealed, payload, number=0):
    return struct.pack(">I", len(payload)) + payload + frames._tag(sealed._send_key, number, payload)


@pytest.mark.parametrize(
    "attack",
    [
        lambda sealed: _sealed(sealed, call(), 1) + _sealed(sealed, call(), 0),  # in another order
        lambda sealed: _sealed(sealed, call(), 1),  # one left out
        lambda sealed: _sealed(sealed, call()).replace(b"attack", b"ATTACK"),  # changed
        lambda sealed: _sealed(sealed, call())[:-1] + b"\0",  # the tag changed
        lambda sealed: struct.pack(">I", len(call())) + call() + frames._tag(sealed._receive_key, 0, call()),  # sent back
        lambda sealed: struct.pack(">I", MAX_FRAME_BYTES + 1),  # no byte of it is waited for
        lambda sealed: b"\xff" * 100,
        lambda sealed: _sealed(sealed, b""),
        lambda sealed: _sealed(sealed, b"\x80\x04\x95cposix\nsystem\n"),  # a pickle
        lambda sealed: _sealed(sealed, b"[" * 100_000),
        lambda sealed: _sealed(sealed, call().replace(b'"call"', b'"exec"')),
        lambda sealed: _sealed(sealed, call().replace(b'"id": 1', b'"id": -1')),
        lambda sealed: _sealed(sealed, call().replace(b'"call"', b'"event"')),  # this side takes no events
    ],
)  # fmt: skip
def test_a_bad_frame_ends_its_connection_with_one_line(attack, caplog):
    async def main():
        async with guarded() as (_, port, taken), admitted(port) as (sealed, reader, writer):
            writer.write(attack(sealed))
            assert await is_ended(reader)
        assert not taken

    asyncio.run(main())
    assert [record.getMessage().split(" with ")[0] for record in caplog.records] == ["control connection"]


def test_a_frame_counts_once():
    async def main():
        async with guarded() as (_, port, taken), admitted(port) as (sealed, reader, writer):
            writer.write(_sealed(sealed, call("once")))
            assert b'"kind":"reply"' in await asyncio.wait_for(sealed.receive(), 60)
            writer.write(_sealed(sealed, call("once")))
            assert await is_ended(reader)
            assert taken == ["once"]

    asyncio.run(main())


@pytest.mark.parametrize("size", [1, 3, 4, 20, -1])
def test_a_frame_that_is_cut_off(size):
    async def main():
        async with guarded() as (_, port, taken), admitted(port) as (sealed, reader, writer):
            writer.write(_sealed(sealed, call())[:size])
            writer.write_eof()
            assert await is_ended(reader)
        assert not taken

    asyncio.run(main())


@pytest.mark.parametrize(
    "body",
    [b"", b"{}{}", b"[]", b"null", b'{"text": 1}', b'{"text": "", "more": 1}', b'{"number": 1e999}', b"\xff", b"[" * 100_000],
)
def test_a_message_that_is_none_is_refused(body):
    async def main():
        async with guarded() as (_, port, taken), admitted(port) as (sealed, _, _):
            sealed.send(call().partition(b"\n")[0] + b"\n" + body)
            assert b'"kind":"error"' in await asyncio.wait_for(sealed.receive(), 60)
        assert not taken

    asyncio.run(main())


def test_strangers_cannot_take_the_places_of_others():
    async def main():
        async with guarded(max_strangers=4, handshake_s=60) as (server, port, taken):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
            for reader, _ in silent[:5]:  # those who were first have given way
                assert await is_ended(reader)
            while len(list(server._strangers)) < 4:  # the last one is there
                await asyncio.sleep(0.001)
            peer = await connect(f"127.0.0.1:{port}", KEY)
            assert await peer.call(Ask(text="peer"), 10) == Answer(text="peer")
            assert await is_ended(silent[5][0])
            assert not any(reader.at_eof() for reader, _ in silent[6:]), "one for the peer"
            for _, writer in silent:
                writer.close()
            await peer.close()
        assert taken == ["peer"]

    asyncio.run(main())


def test_a_stranger_has_a_limited_time():
    async def main():
        async with guarded(handshake_s=0.3) as (_, port, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await is_ended(reader)
            writer.close()

    asyncio.run(main())


def test_one_connection_too_many_is_told_so():
    async def main():
        async with guarded(max_connections=2) as (server, port, _):
            second = await connect(f"127.0.0.1:{port}", KEY)
            await second.call(Ask(), 10)
            with pytest.raises(PeerError, match="as many connections as it takes"):
                await connect(f"127.0.0.1:{port}", KEY)
            await second.close()
            while len(server.connections) > 1:
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_another_version_is_told_so(monkeypatch):
    async def main():
        async with guarded() as (_, port, _):
            answer = await told(port, frames._MAGIC + bytes([9]) + bytes(32))
            assert answer[: len(frames._MAGIC) + 1] == frames._MAGIC + bytes([frames.PROTOCOL]) and len(answer) == 45

    asyncio.run(main())
