"""The side that is connected to."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from sagellm.comm_backend.control.addresses import join_address, prepare
from sagellm.comm_backend.control.connection import ControlConnection, Handler
from sagellm.comm_backend.control.frames import Frames, welcome
from sagellm.comm_backend.control.registry import register
from sagellm.comm_backend.open_ports import Strangers
from sagellm.core.errors import ConfigError, PeerError
from sagellm.core.tasks import within

__all__ = ["ControlServer"]

logger = logging.getLogger("sagellm")


class ControlServer:
    """Serves those who have the key.

    A handler is a coroutine function that takes the connection and a message, and returns the reply. A `SageError` of it
    reaches the caller in its words, anything else as "internal error" with a line in the log. Handlers of one connection
    run at the same time; they are cancelled when it ends.

    Args:
        key: of the group.
        handlers: by type of message.
        on_closed: called with each connection that has ended, when its handlers have.
        max_connections: that have proved the key. `max_strangers`: that have not yet; they have `handshake_s` to do so, and
            less when more of them come: the oldest gives way.
    """

    def __init__(
        self,
        key: bytes,
        handlers: Mapping[type[BaseModel], Handler],
        on_closed: Callable[[ControlConnection], Any] | None = None,
        *,
        max_connections: int = 256,
        max_strangers: int = 32,
        handshake_s: float = 5.0,
    ) -> None:
        self._key, self._handlers, self._on_closed = key, dict(handlers), on_closed
        self._max_connections, self._handshake_s = max_connections, handshake_s
        self._server: asyncio.Server | None = None
        self._connections: set[ControlConnection] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._strangers: Strangers[asyncio.StreamWriter] = Strangers(max_strangers)
        self._is_closing = False
        register(*self._handlers)

    @property
    def connections(self) -> tuple[ControlConnection, ...]:
        return tuple(self._connections)

    async def start(self, host: str, port: int = 0) -> str:
        """Listen, and return the address, host:port; port 0 is any free one.

        Raises:
            ConfigError: the port is in use, or the host is not an address of this machine.
        """
        try:
            self._server = await asyncio.start_server(self._accept, host, port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen for control connections on {host} port {port}: {_words(error)}. Choose another port."
            ) from None
        return join_address(host, self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End all connections and free the port."""
        if self._server is None:
            return
        self._is_closing = True
        self._server.close()
        for task in tuple(self._serving):
            task.cancel()
        if self._serving:
            await asyncio.wait(tuple(self._serving))
        await self._server.wait_closed()
        self._server = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closing:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        self._serving.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # by `close`; asyncio would report it
        except Exception:
            logger.exception("a control connection was dropped")
        finally:
            self._serving.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        remote = prepare(writer)
        frames = await self._let_in(reader, writer, remote)
        if frames is None:
            return
        connection = ControlConnection(frames, writer, remote, self._handlers)
        self._connections.add(connection)
        try:
            await connection.wait_closed()
        finally:
            self._connections.discard(connection)
            await connection.close()
            if self._on_closed is not None:
                self._on_closed(connection)

    async def _let_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, remote: str) -> Frames | None:
        # Those who have the key are counted apart: strangers cannot take their places.
        oldest = self._strangers.add(writer)
        if oldest is not None:
            oldest.transport.abort()  # which ends its handshake
        try:
            is_full = len(self._connections) >= self._max_connections
            return await within(welcome(reader, writer, self._key, is_full), self._handshake_s)
        except asyncio.TimeoutError:
            logger.warning("control connection of %s refused: no handshake within %g s", remote, self._handshake_s)
        except (PeerError, OSError) as error:
            why = error if writer in self._strangers else "it was the first of too many in the handshake"
            logger.warning("control connection of %s refused: %s", remote, why)
        finally:
            self._strangers.remove(writer)
        await self._say_and_close(writer)
        return None

    async def _say_and_close(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        try:
            await within(writer.wait_closed(), 1)
        except (OSError, asyncio.TimeoutError):
            writer.transport.abort()


def _words(error: OSError) -> str:
    """asyncio puts the address before the words, in words of its own."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror or error)
