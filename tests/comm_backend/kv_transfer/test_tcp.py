"""The channel `tcp`: what comes over its socket that should not, and what that does to others."""

import hmac
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from sagellm.comm_backend.kv_transfer import tcp_server
from sagellm.comm_backend.kv_transfer.base import TransferOptions, TransferPlan
from sagellm.comm_backend.kv_transfer.contract.desk import layout_of
from sagellm.comm_backend.kv_transfer.contract.owner import KEY, make_region
from sagellm.comm_backend.kv_transfer.tcp import TcpChannel
from sagellm.comm_backend.kv_transfer.tcp_frames import MAX_PIECES, REPLY, REQUEST, Gone, receive, welcome
from sagellm.core.errors import TransferCancelled, TransferError, TransferTimeoutError

LAYOUT = layout_of()
PLAN = TransferPlan(transfer_id="t", source="p", block_ids=(1, 2), target_blocks=(3, 4), num_tokens=8, timeout_s=10)


@pytest.fixture
def pair():
    """Two channels, the second connected to the first."""
    channels = [TcpChannel(make_region(TcpChannel, LAYOUT, seed), TransferOptions(key=KEY)) for seed in (1, None)]
    channels[1].connect("p", [channels[0].endpoint()])
    yield channels
    for channel in channels:
        channel.close()


def dial(channel: TcpChannel) -> socket.socket:
    address = channel.endpoint().address
    connection = socket.create_connection((address["host"], address["port"]), 10)
    try:
        welcome(connection, KEY, address["token"].encode(), time.monotonic() + 10)
    except Gone:
        connection.close()
        raise
    return connection


def is_closed(connection: socket.socket) -> bool:
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


@pytest.mark.parametrize(
    "frame",
    [
        REQUEST.pack(1, 9, 1) + struct.pack("<QQ", 0, 8),
        REQUEST.pack(1, 0, 0),
        REQUEST.pack(1, 0, MAX_PIECES + 1),
        REQUEST.pack(1, 0, 2**32 - 1),
        REQUEST.pack(1, 0, 1) + struct.pack("<QQ", 0, 0),
        REQUEST.pack(1, 0, 1) + struct.pack("<QQ", 2**63, 8),
        REQUEST.pack(1, 0, 1) + struct.pack("<QQ", 2**64 - 1, 2**64 - 1),
        REQUEST.pack(1, 0, 1) + struct.pack("<QQ", 0, 2**40),
        REQUEST.pack(1, 0, 2) + struct.pack("<QQQQ", 0, 8, LAYOUT.num_bytes(LAYOUT.parts[0]) - 7, 8),
    ],
)
def test_a_request_that_makes_no_sense_ends_its_own_connection(pair, frame: bytes):
    owner, reader = pair
    with dial(owner) as connection:
        connection.sendall(frame)
        number, refused, num_bytes = REPLY.unpack(receive(connection, REPLY.size, time.monotonic() + 10))
        assert (number, refused) == (1, 1) and num_bytes < 1024
        assert is_closed(connection)
    assert reader.transfer(PLAN).num_bytes == 8 * LAYOUT.token_bytes()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(64), bytes(64), b"x" * 10])
def test_who_does_not_know_the_key_gets_nothing(pair, said: bytes, monkeypatch):
    owner, reader = pair
    monkeypatch.setattr(tcp_server, "GREET_S", 0.5)
    address = owner.endpoint().address
    with socket.create_connection((address["host"], address["port"]), 10) as connection:
        connection.sendall(said)
        received = b""
        with suppress(ConnectionResetError):  # by what it had said beyond its answer
            while some := connection.recv(4096):
                received += some
    assert len(received) in (40, 73) and not received[40:].strip(b"\0")
    monkeypatch.undo()  # the reader is greeted too
    assert reader.transfer(PLAN).num_bytes


def test_strangers_cannot_take_the_places_of_peers(pair, monkeypatch):
    owner, reader = pair
    monkeypatch.setattr(tcp_server, "GREET_S", 100.0)  # no connection runs out of time
    address = owner.endpoint().address
    with ExitStack() as open_ones:
        peer = open_ones.enter_context(dial(owner))
        silent = []
        for _ in range(tcp_server.MAX_CONNECTIONS + tcp_server.MAX_STRANGERS):
            silent.append(open_ones.enter_context(socket.create_connection((address["host"], address["port"]), 10)))
            receive(silent[-1], 40, time.monotonic() + 10)  # the server waits for its answer
        newcomer = TcpChannel(make_region(TcpChannel, LAYOUT, None), TransferOptions(key=KEY))
        newcomer.connect("p", [owner.endpoint()])
        for channel in (newcomer, reader):
            assert channel.transfer(PLAN).num_bytes == 8 * LAYOUT.token_bytes()
        newcomer.close()
        assert all(is_closed(each) for each in silent[: tcp_server.MAX_CONNECTIONS]), "the first ones have given way"
        peer.sendall(REQUEST.pack(1, 0, 1) + struct.pack("<QQ", 0, 8))
        assert receive(peer, REPLY.size + 8, time.monotonic() + 10)[: REPLY.size] == REPLY.pack(1, 0, 8)
        last = silent[-1]
        last.setblocking(False)
        with pytest.raises(BlockingIOError):
            last.recv(1)


def test_peers_are_limited_for_themselves_and_kept_alive(pair, monkeypatch):
    owner, _ = pair
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 2)
    with dial(owner) as second:
        with pytest.raises(Gone):
            dial(owner)
        number = second.getsockname()[1]
        server = owner._stop_server.peek()[1].__self__
        (served,) = (each for each in server._connections if each.getpeername()[1] == number)
        assert served.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
    deadline = time.monotonic() + 10
    while len(server._connections) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    dial(owner).close()


def test_an_answer_of_an_earlier_connection_is_refused(pair):
    """An answer that a listener has heard on one connection is of no use on another one."""
    owner, _ = pair
    address = owner.endpoint().address
    heard = []
    for _ in range(2):
        with socket.create_connection((address["host"], address["port"]), 10) as connection:
            greeting = receive(connection, 40, time.monotonic() + 10)
            if not heard:
                nonces = greeting[8:] + bytes(32)
                mac = hmac.digest(KEY, b"sagellm kv tcp client" + address["token"].encode() + nonces, "sha256")
                heard.append(bytes(32) + mac)
            connection.sendall(heard[0])
            answers = receive(connection, 33, time.monotonic() + 10)
        heard.append(answers[:1])
    assert heard[1:] == [b"\x01", b"\x00"]


def test_a_server_that_knows_no_key_is_not_believed(pair):
    _, reader = pair
    endpoint = pair[0].endpoint()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        def answer():
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(b"sageKV\x00\x01" + bytes(32))
                receive(connection, 64, time.monotonic() + 10)
                connection.sendall(b"\x01" + bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        port = impostor.getsockname()[1]
        with pytest.raises(TransferError, match="does not have the same key"):
            reader.connect("q", [endpoint.model_copy(update={"address": {**endpoint.address, "port": port}})])
        thread.join()


def test_a_peer_that_says_nothing_is_given_up_at_the_deadline(pair):
    _, reader = pair
    endpoint = pair[0].endpoint()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(TransferTimeoutError, match="did not answer"):
            reader.connect("q", [endpoint.model_copy(update={"address": {**endpoint.address, "port": port}})], timeout_s=0.2)


def test_a_key_is_needed_and_a_port_that_is_taken_is_refused(pair):
    region = make_region(TcpChannel, LAYOUT, None)
    for key in (b"", b"fifteen bytes.."):
        with pytest.raises(TransferError, match="tcp needs a key of 16 bytes or more"):
            TcpChannel(region, TransferOptions(key=key))
    port = pair[0].endpoint().address["port"]
    with pytest.raises(TransferError, match=f"cannot listen on 127.0.0.1:{port}"):
        TcpChannel(region, TransferOptions(key=KEY, options={"port": port}))


def test_a_channel_that_has_closed_leaves_no_thread_and_no_socket(pair):
    owner, reader = pair
    reader.transfer(PLAN)
    owner.close()
    reader.close()
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("kv-tcp") for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-tcp")]
    with pytest.raises(ConnectionRefusedError):
        dial(owner)


def test_a_transfer_that_waits_for_its_turn_is_cancelled_and_has_a_deadline(pair, monkeypatch):
    owner, _ = pair
    reader = TcpChannel(make_region(TcpChannel, LAYOUT, None), TransferOptions(key=KEY, max_running=1))
    reader.connect("p", [owner.endpoint()])
    is_reading, may_go = threading.Event(), threading.Event()

    def read(*_):
        is_reading.set()
        may_go.wait(20)

    monkeypatch.setattr(reader, "_read", read)
    first = threading.Thread(target=reader.transfer, args=(PLAN,))
    first.start()
    assert is_reading.wait(10)
    with pytest.raises(TransferError, match="under way already"):
        reader.transfer(PLAN)
    with pytest.raises(TransferTimeoutError, match=r"within 0\.05 s"):
        reader.transfer(PLAN.model_copy(update={"transfer_id": "late", "timeout_s": 0.05}))
    errors = []

    def wait():
        try:
            reader.transfer(PLAN.model_copy(update={"transfer_id": "second"}))
        except TransferError as error:
            errors.append(type(error))

    second = threading.Thread(target=wait)
    second.start()
    while not reader.cancel("second"):
        pass
    second.join(10)
    assert errors == [TransferCancelled] and reader.report()["cancelled"] == 1
    may_go.set()
    first.join(10)
    reader.close()
    assert reader.report()["transfers"] == 1
