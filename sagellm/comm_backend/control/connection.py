"""One authenticated connection: calls in both directions at once, each with a deadline, and events."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sagellm.comm_backend.control.frames import BadFrame, Frames
from sagellm.comm_backend.control.registry import find
from sagellm.core.errors import PeerError, PeerTimeoutError, SageError
from sagellm.core.tasks import within

__all__ = ["MAX_RUNNING_CALLS", "ControlConnection", "Handler", "OnEvent"]

MAX_RUNNING_CALLS = 4096  # of one peer, in this process
WRITE_LIMIT_S = 10.0  # a peer that does not read for so long is given up
CLOSE_LIMIT_S = 1.0

Message = TypeVar("Message", bound=BaseModel)
Handler = Callable[["ControlConnection", Any], Awaitable[BaseModel]]
OnEvent = Callable[["ControlConnection", Any], None]
logger = logging.getLogger("sagellm")

# asyncio itself holds a client's stream, and the task that reads it, by weak references alone.
_reading: set[asyncio.Task[None]] = set()


class _Head(BaseModel):
    """The first line of a frame; the rest is the message, or the words of an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["call", "reply", "error", "event"]
    id: int = Field(default=0, ge=0, lt=1 << 63)
    type: str = Field(default="", max_length=200)


class _Words(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    message: str


class ControlConnection:
    """Made by `connect` or by a `ControlServer`; lives in one event loop.

    Attributes:
        peer: for handlers to remember who it is; None at first.
        remote: address of the other side, for logs.
    """

    def __init__(
        self,
        frames: Frames,
        writer: asyncio.StreamWriter,
        remote: str,
        handlers: Mapping[type[BaseModel], Handler] | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.peer: Any = None
        self.remote = remote
        self._frames, self._writer = frames, writer
        self._handlers, self._on_event = dict(handlers or {}), on_event
        self._calls: dict[int, asyncio.Future[BaseModel]] = {}
        self._num_calls = 0
        self._running: set[asyncio.Task[None]] = set()
        self._draining = asyncio.Lock()
        self._closed = asyncio.Event()
        self._why = "has closed the connection"
        self._reading = asyncio.get_running_loop().create_task(self._read())
        _reading.add(self._reading)
        self._reading.add_done_callback(_reading.discard)

    @property
    def is_closed(self) -> bool:
        """Also while its last handlers are still ending."""
        return self._writer.is_closing() or self._reading.done()

    @overload
    async def call(self, message: BaseModel, timeout_s: float) -> Any: ...
    @overload
    async def call(self, message: BaseModel, timeout_s: float, expect: type[Message]) -> Message: ...
    async def call(self, message: BaseModel, timeout_s: float, expect: type[BaseModel] | None = None) -> Any:
        """Send a request and wait for its reply, which is of type `expect` where that is given.

        A caller that stops waiting, by deadline or by cancellation, tells the other side nothing.

        Raises:
            PeerTimeoutError: no reply within `timeout_s`.
            PeerError: the other side refuses, in its words; it has gone; its reply is not one; the request is too large.
        """
        name = type(message).__name__
        if self.is_closed:
            raise PeerError(f"{name} to {self.remote}: it {self._why}.")
        self._num_calls += 1
        number = self._num_calls
        reply = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send("call", message, number)
            answer = await within(reply, timeout_s)
        except asyncio.TimeoutError:
            raise PeerTimeoutError(f"{name} to {self.remote}: no reply within {timeout_s:g} s.") from None
        except PeerError as error:
            raise PeerError(f"{name} to {self.remote}: {error}") from None
        finally:
            del self._calls[number]
        if expect is not None and not isinstance(answer, expect):
            raise PeerError(f"{name} to {self.remote}: the reply is a {type(answer).__name__}, not a {expect.__name__}.")
        return answer

    async def tell(self, event: BaseModel) -> None:
        """Send an event. Returns when the peer takes what was sent, so that no memory fills up for one that does not.

        Messages that a handler sends before it returns come before its reply, later ones after it.

        Raises:
            PeerError: it has gone, has not read for 10 s and was given up, or the event is too large.
        """
        name = type(event).__name__
        if self.is_closed:
            raise PeerError(f"{name} to {self.remote}: it {self._why}.")
        self._send("event", event)
        await self._drain()
        if self.is_closed:
            raise PeerError(f"{name} to {self.remote}: it {self._why}.")

    async def wait_closed(self) -> None:
        """Until the connection has ended, from whichever side, and its handlers with it."""
        await self._closed.wait()

    async def close(self) -> None:
        """End the connection: calls that wait fail, handlers that run are cancelled. A second call only waits."""
        if not self.is_closed:
            self._why = "was closed by this side"
            self._writer.close()
            # A peer that does not read would keep what is still to be sent, and the connection with it.
            asyncio.get_running_loop().call_later(CLOSE_LIMIT_S, self._writer.transport.abort)
        if asyncio.current_task() not in self._running:  # a handler would wait for itself
            await self._closed.wait()

    async def _read(self) -> None:
        try:
            while (payload := await self._frames.receive()) is not None:
                self._take(payload)
        except BadFrame as error:
            self._why = f"has sent what cannot be read: {error}".rstrip(".")
            logger.warning("control connection with %s ended: %s", self.remote, error)
        except OSError as error:
            self._why = f"has gone: {error.strerror or error}"
        finally:
            self._writer.close()
            await self._end()

    async def _end(self) -> None:
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(PeerError(f"it {self._why}."))
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        try:
            await within(self._writer.wait_closed(), CLOSE_LIMIT_S)
        except (OSError, asyncio.TimeoutError):
            self._writer.transport.abort()  # what is not sent by now never will be
        self._closed.set()

    def _take(self, payload: bytes) -> None:
        head_bytes, _, body = payload.partition(b"\n")
        try:
            head = _Head.model_validate_json(head_bytes)
        except ValidationError:
            raise BadFrame("the head of a frame is not one.") from None
        if head.kind == "call":
            self._start(head, body)
        elif head.kind == "event":
            self._take_event(head, body)
        else:
            self._settle(head, body)

    def _start(self, head: _Head, body: bytes) -> None:
        kind = find(head.type)
        handler = self._handlers.get(kind) if kind else None
        if handler is None:
            self._refuse(head.id, f"it does not know requests of type {head.type!r}.")
        elif len(self._running) >= MAX_RUNNING_CALLS:
            self._refuse(head.id, f"it works at {MAX_RUNNING_CALLS} requests of this connection, and takes no more.")
        else:
            try:
                message = kind.model_validate_json(body)
            except ValidationError as error:
                self._refuse(head.id, f"it cannot read this {head.type}: {_explain(error)}")
                return
            task = asyncio.get_running_loop().create_task(self._handle(handler, message, head.id))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _handle(self, handler: Handler, message: BaseModel, number: int) -> None:
        try:
            reply = await handler(self, message)
            self._send("reply", reply, number)
        except SageError as error:
            self._refuse(number, str(error))
        except Exception:
            logger.exception("the handler of %s from %s raised", type(message).__name__, self.remote)
            self._refuse(number, "internal error; its log says more.")
        await self._drain()

    def _take_event(self, head: _Head, body: bytes) -> None:
        kind = find(head.type)
        if self._on_event is None or kind is None:
            raise BadFrame(f"an event of type {head.type!r} is not expected here.")
        try:
            event = kind.model_validate_json(body)
        except ValidationError as error:
            raise BadFrame(f"an event {head.type} cannot be read: {_explain(error)}") from None
        try:
            self._on_event(self, event)
        except Exception:
            logger.exception("an event %s from %s was not taken", head.type, self.remote)

    def _settle(self, head: _Head, body: bytes) -> None:
        reply = self._calls.get(head.id)
        if reply is None or reply.done():
            return  # no caller waits any more
        kind = _Words if head.kind == "error" else find(head.type)
        if kind is None:
            reply.set_exception(PeerError(f"the reply is of type {head.type!r}, which this side does not know."))
            return
        try:
            answer = kind.model_validate_json(body)
        except ValidationError as error:
            reply.set_exception(PeerError(f"the reply {head.type} cannot be read: {_explain(error)}"))
            return
        if isinstance(answer, _Words):
            reply.set_exception(PeerError(answer.message))
        else:
            reply.set_result(answer)

    def _refuse(self, number: int, words: str) -> None:
        self._send("error", _Words(message=words[:4000]), number)

    def _send(self, kind: Literal["call", "reply", "error", "event"], message: BaseModel, number: int = 0) -> None:
        head = _Head(kind=kind, id=number, type="" if kind == "error" else type(message).__name__)
        body = message.model_dump_json()
        if not self._writer.is_closing():
            self._frames.send(f"{head.model_dump_json()}\n{body}".encode())

    async def _drain(self) -> None:
        if not self._writer.transport.get_write_buffer_size():
            return  # the kernel has it
        try:
            await within(self._written(), WRITE_LIMIT_S)
        except asyncio.TimeoutError:
            self._why = f"has read nothing for {WRITE_LIMIT_S:g} s, and was given up"
            logger.warning("control connection with %s ended: it %s", self.remote, self._why)
            self._writer.transport.abort()
        except OSError:
            pass  # the reading side notices, and says why

    async def _written(self) -> None:
        async with self._draining:  # early releases of Python 3.10 allow one at a time
            await self._writer.drain()


def _explain(error: ValidationError) -> str:
    """The first thing that is wrong; not the value, which may be long."""
    item = error.errors(include_url=False, include_input=False)[0]
    name = ".".join(str(part) for part in item["loc"])
    return f"{name + ': ' if name else ''}{item['msg']}."
