"""The wire format: a handshake in which both sides prove that they have the key, then frames with a tag each.

A frame is 4 bytes of length, that many bytes, and 32 bytes HMAC-SHA256 over the frame's number and the bytes, with a key of
this connection and direction. So a frame that was changed, repeated, left out, moved or sent back to its sender ends the
connection. Nothing is encrypted.
"""

import asyncio
import hmac
import secrets
import struct

from sagellm.core.errors import PeerError

__all__ = ["MAX_FRAME_BYTES", "PROTOCOL", "BadFrame", "Frames", "greet", "welcome"]

PROTOCOL = 1
MAX_FRAME_BYTES = 4 << 20
_MAGIC = b"sage-control"
_NONCE_BYTES = 32
_TAG_BYTES = 32
_OPENING_BYTES = len(_MAGIC) + 1 + _NONCE_BYTES
_FINE, _WRONG_KEY, _BUSY = b"\0", b"\1", b"\2"
_LENGTH, _NUMBER = struct.Struct(">I"), struct.Struct(">Q")


class BadFrame(PeerError):
    """Bytes that no honest peer sends; the connection ends."""


class Frames:
    """Frames in both directions over one stream; made by `greet` or `welcome`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, send_key: bytes, receive_key: bytes):
        self._reader, self._writer = reader, writer
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0

    def send(self, payload: bytes) -> None:
        """Raises:
        BadFrame: larger than `MAX_FRAME_BYTES`; nothing was sent.
        """
        if len(payload) > MAX_FRAME_BYTES:
            raise BadFrame(f"a message has {len(payload)} bytes; a frame takes {MAX_FRAME_BYTES}.")
        tag = _tag(self._send_key, self._num_sent, payload)
        self._num_sent += 1
        self._writer.write(b"".join((_LENGTH.pack(len(payload)), payload, tag)))

    async def receive(self) -> bytes | None:
        """The next payload, None at the end of the stream.

        Raises:
            BadFrame: too large, cut off, or with a wrong tag.
            OSError: the connection broke.
        """
        try:
            (size,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame of {size} bytes was announced; allowed are {MAX_FRAME_BYTES}.")
            content = await self._reader.readexactly(size + _TAG_BYTES)
        except asyncio.IncompleteReadError as error:
            if error.expected == _LENGTH.size and not error.partial:
                return None
            raise BadFrame("the connection ended within a frame.") from None
        payload = content[:size]
        if not hmac.compare_digest(content[size:], _tag(self._receive_key, self._num_received, payload)):
            raise BadFrame("a frame's tag is wrong: it was changed, repeated or moved.")
        self._num_received += 1
        return payload


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> Frames:
    """The side that connects proves the key first, so that a server says nothing to strangers.

    Raises:
        PeerError: the server does not speak this protocol, does not have this key, or has too many connections.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    writer.write(_MAGIC + bytes([PROTOCOL]) + own)
    try:
        opening = await reader.readexactly(_OPENING_BYTES)
        nonces = own + _nonce(opening)
        writer.write(_proof(key, b"client", nonces))
        # The answering side has not proved anything yet: a refusal is a hint for people, and ends the connection in any case.
        verdict = await reader.readexactly(1)
        if verdict == _WRONG_KEY:
            raise PeerError("it has another key; give both sides the same key file.")
        if verdict == _BUSY:
            raise PeerError("it has as many connections as it takes; try again later.")
        proof = await reader.readexactly(_TAG_BYTES)
    except asyncio.IncompleteReadError:
        raise PeerError("it ended the connection in the handshake; is it a control address of this group?") from None
    if verdict != _FINE or not hmac.compare_digest(proof, _proof(key, b"server", nonces)):
        raise PeerError("it does not prove that it has the key; give both sides the same key file.")
    return Frames(reader, writer, _proof(key, b"from client", nonces), _proof(key, b"from server", nonces))


async def welcome(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, is_full: bool = False
) -> Frames:
    """The side that is connected to; `is_full`: tell who has the key that there are too many connections.

    Raises:
        PeerError: who connects does not speak this protocol, does not have the key, has gone, or is one too many.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    try:
        opening = await reader.readexactly(_OPENING_BYTES)
        if opening.startswith(_MAGIC):  # also to another version, which then can say so
            writer.write(_MAGIC + bytes([PROTOCOL]) + own)
        nonces = _nonce(opening) + own
        proof = await reader.readexactly(_TAG_BYTES)
    except asyncio.IncompleteReadError:
        raise PeerError("it ended the connection in the handshake.") from None
    if not hmac.compare_digest(proof, _proof(key, b"client", nonces)):
        writer.write(_WRONG_KEY)
        raise PeerError("it does not have the key.")
    if is_full:
        writer.write(_BUSY)
        raise PeerError("it is one more than this server takes.")
    writer.write(_FINE + _proof(key, b"server", nonces))
    return Frames(reader, writer, _proof(key, b"from server", nonces), _proof(key, b"from client", nonces))


def _nonce(opening: bytes) -> bytes:
    magic, version, nonce = opening[: len(_MAGIC)], opening[len(_MAGIC)], opening[len(_MAGIC) + 1 :]
    if magic != _MAGIC:
        raise PeerError("it does not speak the control protocol.")
    if version != PROTOCOL:
        raise PeerError(f"it speaks version {version} of the control protocol, not {PROTOCOL}; use one sageLLM everywhere.")
    return nonce


def _proof(key: bytes, label: bytes, nonces: bytes) -> bytes:
    """Labels differ with side and purpose: nothing that one side sends can be sent back to it."""
    return hmac.digest(key, b"%s %d %s\0%s" % (_MAGIC, PROTOCOL, label, nonces), "sha256")


def _tag(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + payload, "sha256")
