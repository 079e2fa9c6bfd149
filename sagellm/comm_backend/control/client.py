"""The side that connects."""

import asyncio
import os

from sagellm.comm_backend.control.addresses import prepare, split_address
from sagellm.comm_backend.control.connection import ControlConnection, OnEvent
from sagellm.comm_backend.control.frames import Frames, greet
from sagellm.core.errors import PeerError, PeerTimeoutError
from sagellm.core.tasks import within

__all__ = ["connect"]


async def connect(address: str, key: bytes, *, on_event: OnEvent | None = None, timeout_s: float = 10.0) -> ControlConnection:
    """A connection to the control server at `address`, host:port.

    `on_event(connection, event)` is called in the event loop, in the order of the events, and must not wait. Without it an
    event ends the connection.

    Raises:
        ConfigError: not an address.
        PeerTimeoutError: `timeout_s` has passed.
        PeerError: no answer, another key, or another protocol.
    """
    host, port = split_address(address)
    writer: asyncio.StreamWriter | None = None
    is_open = False

    async def open_it() -> Frames:
        nonlocal writer
        reader, writer = await asyncio.open_connection(host, port)
        prepare(writer)
        return await greet(reader, writer, key)

    try:
        frames = await within(open_it(), timeout_s)
        assert writer is not None
        is_open = True
        return ControlConnection(frames, writer, address, on_event=on_event)
    except asyncio.TimeoutError:
        raise PeerTimeoutError(f"cannot connect to {address}: not done within {timeout_s:g} s.") from None
    except OSError as failed:
        words = os.strerror(failed.errno) if failed.errno and failed.errno > 0 else failed.strerror or failed
        raise PeerError(f"cannot connect to {address}: {words}.") from None
    except PeerError as failed:
        raise PeerError(f"cannot connect to {address}: {failed}") from None
    finally:
        if writer is not None and not is_open:
            writer.transport.abort()
