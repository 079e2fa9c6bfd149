"""Wire format of the channel `tcp`: proof of the key on both ends, requests and replies.

The server begins with a greeting and 32 random bytes; the client answers with 32 of its own and a MAC over both, the server
with a MAC of another kind: neither can be had from the other, nor from an earlier connection. Then a request names pieces of
one part's tensor, and its reply is their bytes, in order. Nothing of what comes in is more than numbers that are checked.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence

from sagellm.core.errors import TransferError

__all__ = [
    "MAX_PIECES", "MAX_REQUEST_BYTES", "REPLY", "REQUEST", "Gone", "greet", "receive", "receive_into", "send_all", "welcome"
]  # fmt: skip

MAX_PIECES = 512
MAX_REQUEST_BYTES = 1 << 20
REQUEST = struct.Struct("<IHxxI")  # number, part, count of pieces; then offset and length of each, 64 bits
REPLY = struct.Struct("<IBxxxQ")  # number, 0 or 1 for a refusal, bytes that follow
_GREETING = b"sageKV\x00\x01"
_NONCE = _MAC = 32
_AT_ONCE = 64  # buffers for one call of the kernel


class Gone(Exception):
    """The other end has closed the connection."""


def greet(connection: socket.socket, key: bytes, token: bytes, deadline: float, admit: Callable[[], bool]) -> bool:
    """The server's part; whether the client knows the key, and is admitted, which is asked before it hears of it.

    `token`: of this server, which clients were told.
    """
    nonce = secrets.token_bytes(_NONCE)
    send_all(connection, [_GREETING + nonce], deadline)
    answer = receive(connection, _NONCE + _MAC, deadline)
    nonces = nonce + answer[:_NONCE]
    if not hmac.compare_digest(answer[_NONCE:], _mac(key, b"client", token, nonces)):
        send_all(connection, [bytes(1 + _MAC)], deadline)
        return False
    if not admit():
        return False
    send_all(connection, [b"\x01" + _mac(key, b"server", token, nonces)], deadline)
    return True


def welcome(connection: socket.socket, key: bytes, token: bytes, deadline: float) -> None:
    """The client's part. Raises TransferError: it is no such server, or one of the two does not know the key."""
    greeting = receive(connection, len(_GREETING) + _NONCE, deadline)
    if not greeting.startswith(_GREETING):
        raise TransferError("what listens there is no KV channel of this version.")
    own = secrets.token_bytes(_NONCE)
    nonces = greeting[len(_GREETING) :] + own
    send_all(connection, [own + _mac(key, b"client", token, nonces)], deadline)
    answer = receive(connection, 1 + _MAC, deadline)
    if answer[:1] != b"\x01" or not hmac.compare_digest(answer[1:], _mac(key, b"server", token, nonces)):
        raise TransferError("it is another engine, or does not have the same key; start all engines with one key.")


def _mac(key: bytes, whose: bytes, token: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, b"sagellm kv tcp " + whose + token + nonces, "sha256")


def receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Raises Gone; TimeoutError; OSError."""
    data = bytearray(num_bytes)
    receive_into(connection, [memoryview(data)], deadline)
    return bytes(data)


def receive_into(connection: socket.socket, buffers: Sequence[memoryview], deadline: float) -> None:
    """Fill them in order. Nothing is written after the deadline. Raises Gone; TimeoutError; OSError."""
    waiting = [buffer for buffer in reversed(buffers) if buffer.nbytes]  # a list is short of its last one at no cost
    while waiting:
        some = waiting[: -_AT_ONCE - 1 : -1]
        _limit(connection, deadline)
        num_bytes = connection.recvmsg_into(some)[0]
        if num_bytes == 0:
            raise Gone
        _advance(waiting, num_bytes)


def send_all(connection: socket.socket, buffers: Sequence[bytes | memoryview], deadline: float) -> None:
    """Raises TimeoutError; OSError."""
    waiting = [memoryview(buffer) for buffer in reversed(buffers) if len(buffer)]
    while waiting:
        _limit(connection, deadline)
        _advance(waiting, connection.sendmsg(waiting[: -_AT_ONCE - 1 : -1]))


def _limit(connection: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)


def _advance(waiting: list[memoryview], num_bytes: int) -> None:
    while num_bytes:
        first = waiting.pop()
        if num_bytes < first.nbytes:
            waiting.append(first[num_bytes:])
            return
        num_bytes -= first.nbytes
