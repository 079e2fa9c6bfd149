"""KV blocks over sockets: for engines that share no memory, on one host or several."""

import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from sagellm.comm_backend.kv_transfer.base import KVTransferChannel, Read
from sagellm.comm_backend.kv_transfer.conversion import Pieces
from sagellm.comm_backend.kv_transfer.copying import as_bytes
from sagellm.comm_backend.kv_transfer.layout import Model
from sagellm.comm_backend.kv_transfer.plan import TransferEndpoint, parsed
from sagellm.comm_backend.kv_transfer.tcp_frames import (
    MAX_PIECES,
    MAX_REQUEST_BYTES,
    REPLY,
    REQUEST,
    Gone,
    receive,
    receive_into,
    send_all,
    welcome,
)  # fmt: skip
from sagellm.comm_backend.kv_transfer.tcp_server import TcpServer
from sagellm.comm_backend.kv_transfer.turns import Run
from sagellm.comm_backend.open_ports import keep_alive
from sagellm.core.errors import TransferError, TransferTimeoutError

__all__ = ["TcpChannel", "TcpOptions"]

AHEAD = 4  # requests under way; their frames fit any socket's buffers, so that neither side waits for the other to read
MAX_IDLE = 8
MIN_KEY_BYTES = 16


class TcpOptions(Model):
    """`port`: 0, a free one. `advertise`: the host that peers are told, where that is not the one it listens on."""

    port: int = Field(default=0, ge=0, le=65535)
    advertise: str = ""


class Address(Model):
    host: str = Field(min_length=1, max_length=255)
    port: int = Field(ge=1, le=65535)
    token: str = Field(pattern="^[0-9a-f]{32}$")


class _Request(NamedTuple):
    number: int
    frame: bytes
    buffers: list[memoryview]
    num_bytes: int


class TcpChannel(KVTransferChannel):
    """Sockets, several requests under way, from and into KV memory; both sides show that they know the group's key."""

    name = "tcp"
    checks_key = True
    Options = TcpOptions

    @classmethod
    def missing(cls) -> str:
        return "" if hasattr(socket.socket, "recvmsg_into") else "it needs a Unix with recvmsg."

    def _open(self) -> dict[str, Any]:
        if len(self.options.key) < MIN_KEY_BYTES:
            raise TransferError(
                f"tcp needs a key of {MIN_KEY_BYTES} bytes or more, it has {len(self.options.key)}; give all engines one key."
            )
        token = secrets.token_hex(16)
        parts = [memoryview(as_bytes(tensor)).toreadonly() for tensor in self.region.tensors]
        server = TcpServer(parts, self.options.key, token.encode(), self.options.host, self.own_options.port)
        self._stop_server = weakref.finalize(self, server.close)
        host = self.own_options.advertise or self.options.host
        return Address(host=host, port=server.port, token=token).model_dump()

    def _connect(self, endpoint: TransferEndpoint, deadline: float) -> "_Link":
        link = _Link(parsed(Address, endpoint.address, "address of the peer"), self.options.key)
        link.give(link.dial(deadline))
        return link

    def _disconnect(self, link: "_Link") -> None:
        link.close()

    def _read(self, link: "_Link", reads: Sequence[Read], run: Run) -> None:
        try:
            connection = link.take(run.deadline)
            try:
                with run.woken_by(lambda: connection.shutdown(socket.SHUT_RDWR)):
                    _read_all(connection, reads, run)
            except BaseException:
                connection.close()  # what is still on its way is never read
                raise
            link.give(connection)
        except (Gone, OSError) as error:
            run.check()
            if isinstance(error, TimeoutError):
                raise run.timed_out() from None
            raise TransferError(f"{link.where} has gone ({error or 'it closed the connection'}).") from None

    def _close(self) -> None:
        self._stop_server()


class _Link:
    """Connections to one rank of a peer; a transfer has one for itself."""

    def __init__(self, address: Address, key: bytes) -> None:
        self._address, self._key = address, key
        self.where = f"{address.host}:{address.port}"
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._closed = False

    def dial(self, deadline: float) -> socket.socket:
        """Raises TransferError, TransferTimeoutError."""
        try:
            limit_s = max(deadline - time.monotonic(), 1e-3)
            connection = socket.create_connection((self._address.host, self._address.port), limit_s)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(connection)
                welcome(connection, self._key, self._address.token.encode(), deadline)
            except BaseException:
                connection.close()
                raise
        except TransferError as error:
            raise TransferError(f"{self.where}: {error}") from None
        except TimeoutError:
            raise TransferTimeoutError(f"{self.where} did not answer before the deadline.") from None
        except (Gone, OSError) as error:
            said = str(error) or "it closed the connection"
            raise TransferError(f"{self.where} cannot be reached: {said}.") from None
        return connection

    def take(self, deadline: float) -> socket.socket:
        while True:
            with self._lock:
                if self._closed:
                    raise TransferError("the peer was disconnected.")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self.dial(deadline)
            if _is_quiet(connection):
                return connection
            connection.close()

    def give(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _is_quiet(connection: socket.socket) -> bool:
    """Open, with nothing to read: the other end of one that is not has gone, or is out of step."""
    connection.settimeout(0)
    with suppress(BlockingIOError):
        with suppress(OSError):
            connection.recv(1, socket.MSG_PEEK)
        return False
    return True


def _read_all(connection: socket.socket, reads: Sequence[Read], run: Run) -> None:
    requests = _requests(reads)
    under_way: deque[_Request] = deque()
    while True:
        for request in islice(requests, AHEAD - len(under_way)):
            send_all(connection, [request.frame], run.deadline)
            under_way.append(request)
        if not under_way:
            return
        run.check()
        _take_reply(connection, under_way.popleft(), run)


def _requests(reads: Sequence[Read]) -> Iterator[_Request]:
    number = 0
    for some, target in reads:
        memory = memoryview(as_bytes(target))
        places: list[tuple[int, int]] = []
        buffers: list[memoryview] = []
        total = 0
        for src, dst, size in _parts(some):
            if places and (total + size > MAX_REQUEST_BYTES or len(places) == MAX_PIECES):
                yield _request(number, some.part, places, buffers, total)
                number, places, buffers, total = number + 1, [], [], 0
            places.append((src, size))
            buffers.append(memory[dst : dst + size])
            total += size
        yield _request(number, some.part, places, buffers, total)
        number += 1


def _parts(some: Pieces) -> Iterator[tuple[int, int, int]]:
    """Pieces, none larger than a request."""
    for src, dst, size in zip(some.src.tolist(), some.dst.tolist(), some.num_bytes.tolist(), strict=True):
        for begin in range(0, size, MAX_REQUEST_BYTES):
            yield src + begin, dst + begin, min(MAX_REQUEST_BYTES, size - begin)


def _request(number: int, part: int, places: list[tuple[int, int]], buffers: list[memoryview], total: int) -> _Request:
    number &= 0xFFFFFFFF
    frame = REQUEST.pack(number, part, len(places)) + np.array(places, "<u8").tobytes()
    return _Request(number, frame, buffers, total)


def _take_reply(connection: socket.socket, request: _Request, run: Run) -> None:
    number, refused, num_bytes = REPLY.unpack(receive(connection, REPLY.size, run.deadline))
    if refused:
        text = receive(connection, min(num_bytes, 1024), run.deadline).decode(errors="replace")
        raise TransferError(f"the peer refused: {text}.")
    if (number, num_bytes) != (request.number, request.num_bytes):
        wanted = f"{request.number} with {request.num_bytes}"
        raise TransferError(f"the peer answered request {number} with {num_bytes} bytes, not {wanted}.")
    receive_into(connection, request.buffers, run.deadline)
