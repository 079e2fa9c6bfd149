"""Serves reads of one worker's KV blocks: a thread that accepts, and one for each connection."""

import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from sagellm.comm_backend.kv_transfer.tcp_frames import (
    MAX_PIECES,
    MAX_REQUEST_BYTES,
    REPLY,
    REQUEST,
    Gone,
    greet,
    receive,
    send_all,
)  # fmt: skip
from sagellm.comm_backend.open_ports import Strangers, keep_alive
from sagellm.core.errors import TransferError

__all__ = ["TcpServer"]

GREET_S = 5.0  # for a client to show that it knows the key
STALL_S = 60.0  # for a client to take what it asked for
MAX_CONNECTIONS = 256  # of clients that know it
MAX_STRANGERS = 64  # that have not shown it yet


class TcpServer:
    """Knows nothing of the channel, so that a channel that is forgotten can end it.

    Args:
        parts: bytes of each part's tensor, read-only.
        key: of the group. `token`: of this server.

    Raises:
        TransferError: the address cannot be had.
    """

    def __init__(self, parts: Sequence[memoryview], key: bytes, token: bytes, host: str, port: int) -> None:
        self._parts, self._key, self._token = parts, key, token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=64)
        except OSError as error:
            raise TransferError(f"tcp cannot listen on {host}:{port}: {error}; choose another host or port.") from None
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._strangers: Strangers[socket.socket] = Strangers(MAX_STRANGERS)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            self._closed = True
            connections = [*self._connections, *self._strangers]
        for each in (self._listener, *connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        self._listener.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of files, or a client that has left already
                continue
            with self._lock:
                is_welcome = not self._closed
                oldest = self._strangers.add(connection) if is_welcome else None
                if oldest is not None:
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it, but not before it has this lock
            if is_welcome:
                threading.Thread(target=self._serve, args=(connection,), name="kv-tcp-serve", daemon=True).start()
            else:
                connection.close()

    def _admit(self, connection: socket.socket) -> bool:
        """It knows the key. Whether it may stay: it has not had to give way, and there are not too many."""
        with self._lock:
            may_stay = self._strangers.remove(connection) and not self._closed and len(self._connections) < MAX_CONNECTIONS
            if may_stay:
                self._connections.add(connection)
            return may_stay

    def _serve(self, connection: socket.socket) -> None:
        """A client can end its own connection at most."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection)  # between requests nothing else would tell that its host has gone
            if greet(connection, self._key, self._token, time.monotonic() + GREET_S, lambda: self._admit(connection)):
                while self._answer(connection):
                    pass
        except (Gone, OSError):
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
                self._strangers.remove(connection)
            connection.close()

    def _answer(self, connection: socket.socket) -> bool:
        """One request; whether the connection goes on."""
        head = bytearray(REQUEST.size)
        connection.settimeout(None)  # a client may be silent as long as it likes
        first = connection.recv_into(head)
        if first == 0:
            return False
        deadline = time.monotonic() + STALL_S
        head[first:] = receive(connection, REQUEST.size - first, deadline)
        number, part, count = REQUEST.unpack(head)
        if part >= len(self._parts) or not 1 <= count <= MAX_PIECES:
            return self._refuse(connection, number, f"part {part} with {count} pieces was asked for", deadline)
        pieces = list(struct.iter_unpack("<QQ", receive(connection, count * 16, deadline)))
        source = self._parts[part]
        total = sum(size for _, size in pieces)
        if total > MAX_REQUEST_BYTES or any(size == 0 or offset + size > source.nbytes for offset, size in pieces):
            return self._refuse(connection, number, f"{total} bytes not within {source.nbytes}, or too many", deadline)
        views = [source[offset : offset + size] for offset, size in pieces]
        send_all(connection, [REPLY.pack(number, 0, total), *views], deadline)
        return True

    def _refuse(self, connection: socket.socket, number: int, why: str, deadline: float) -> bool:
        text = why.encode()[:1024]
        send_all(connection, [REPLY.pack(number, 1, len(text)), text], deadline)
        return False
