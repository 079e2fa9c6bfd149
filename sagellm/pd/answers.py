"""One request at a proxy: its arrival, the answer of an engine on its way to the client, and a client that leaves."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
from starlette.responses import Response

from sagellm.pd.bodies import BadBody, Body, error_body, read_body

__all__ = [
    "ClientLeft", "Ending", "Failed", "ProxiedResponse", "cause_of", "relay_answer", "send_whole", "unless_hanging", "words_of",
]  # fmt: skip

DONE = b"data: [DONE]"
ERROR_EVENT = b'data: {"error":'  # of an engine's server that ends a stream; quotes of generated text are escaped
Answer = tuple[int, bytes, str]  # status, content, media type


class Ending(asyncio.Event):
    """Is set when the requests of an engine must end: it lives and answers nothing, or as `words` say."""

    words = "it does not answer any more"


class Failed(Exception):
    """An engine failed before anything of its answer was shown."""

    def __init__(self, cause: str, words: str, answer: Answer | None = None) -> None:
        super().__init__(words)
        self.cause, self.answer = cause, answer


class ClientLeft(Exception):
    """The answer cannot be sent to the client."""


class ProxiedResponse(Response):
    """Serves one request from its arrival to its end. A client that leaves ends it.

    Attributes:
        arrived: time of `time.monotonic`.
        first_byte_s: seconds from the arrival to the first byte of an answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrived = time.monotonic()
        self.first_byte_s: float | None = None
        self._is_answered = False

    async def serve(self, body: Body, scope: dict, send: Any) -> str:
        """Answer, and return the outcome, for the metrics."""
        raise NotImplementedError

    def ended(self, outcome: str) -> None:
        """The request has ended. Called once."""

    def note_first_byte(self) -> None:
        self.first_byte_s = round(time.monotonic() - self.arrived, 6)

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        outcome = "failed"
        send = self._noting(send)
        try:
            try:
                body = await read_body(receive)
            except BadBody as bad:
                outcome = "refused"
                await send_whole(send, bad.status, error_body(str(bad), bad.status))
                return
            if body is None:
                outcome = "client left"
                return
            outcome = await self._until_client_leaves(self.serve(body, scope, send), receive)
        except ClientLeft:
            outcome = "client left"
        finally:
            self.ended(outcome)

    def _noting(self, send: Any) -> Any:
        """A server calls the end of an answer a disconnect, too. Raises ClientLeft: of all that fails in a request this alone
        is the client's."""

        async def noting(message: dict) -> None:
            if message["type"] == "http.response.body":
                # A client may leave at this mark, before the end of the connection.
                self._is_answered |= not message.get("more_body", False) or DONE in message.get("body", b"")[-32:]
            try:
                await send(message)
            except OSError as error:
                raise ClientLeft from error

        return noting

    async def _until_client_leaves(self, serving: Any, receive: Any) -> str:
        work = asyncio.ensure_future(serving)
        gone = asyncio.ensure_future(_wait_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not self._is_answered:
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
                return "client left"
            return await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


async def relay_answer(
    posting: Any, stream: bool, send: Any, *, who: str, hangs: Ending, on_first: Callable[[], None],
    reworded: Callable[[int, bytes, str], Answer] = lambda *answer: answer,
) -> tuple[str, str]:  # fmt: skip
    """Pass the answer of an engine on to a client, byte for byte.

    Args:
        posting: the request to the engine, a context manager that gives the answer of aiohttp.
        stream: whether the client asked for a stream.
        who: the engine, in an error for the client.
        hangs: is set when the engine is found to hang; `unless_hanging` cancels this call then.
        on_first: called when the first byte is there.
        reworded: changes an answer with an error status.

    Returns:
        The outcome (served, refused, or broken in the middle of a stream) and what broke it.

    Raises:
        Failed: nothing of an answer was shown; another engine may give it.
    """
    shown = False
    try:
        async with posting as answer:
            media = answer.headers.get("content-type", "application/json")
            if answer.status >= 500:
                words = await answer.read()
                whole = reworded(answer.status, words, media)
                raise Failed(f"status {answer.status}", words[:300].decode(errors="replace"), whole)
            if not stream or not media.startswith("text/event-stream"):
                whole = answer.status, await answer.read(), media
                on_first()
                shown = True
                await send_whole(send, *(whole if answer.status < 400 else reworded(*whole)))
                return "served" if answer.status < 400 else "refused", ""
            pieces = answer.content.iter_any()
            piece = await anext(pieces, b"")  # the headers alone promise nothing
            if not piece:
                raise Failed("empty", "its answer ended before it began")
            if piece.startswith(ERROR_EVENT):
                raise Failed("error event", _engine_error(piece.removeprefix(ERROR_EVENT)))
            on_first()
            shown = True
            await _send_start(send, answer.status, [(b"content-type", media.encode()), (b"cache-control", b"no-cache")])
            words = await _send_pieces(piece, pieces, send, hangs)
            if words:
                text = f"{who} failed in the middle of this answer ({words}); send the request again."
                event = b"data: " + error_body(text, 502) + b"\n\n"
                # A chunk may be cut off in the middle of an event: an empty line ends what there is of it.
                await send({"type": "http.response.body", "body": b"\n\n" + event, "more_body": False})
                return "broken", words
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return "served", ""
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        if shown:  # the engine's side has been seen to
            raise
        raise Failed(cause_of(error), words_of(error)) from None
    except asyncio.CancelledError:
        if shown or not hangs.is_set():
            raise
        raise Failed("hangs", hangs.words) from None


async def _send_pieces(piece: bytes, pieces: AsyncIterator[bytes], send: Any, hangs: Ending) -> str:
    """Send a stream up to its end; returns what broke it."""
    tail = b""
    while piece:
        piece, _, error = piece.partition(ERROR_EVENT)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        if error:
            return _engine_error(error)
        tail = (tail + piece)[-64:]
        try:
            piece = await anext(pieces, b"")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as broke:
            return words_of(broke)
        except asyncio.CancelledError:
            if not hangs.is_set():
                raise
            return hangs.words
    return "" if DONE in tail else "its answer ended without [DONE]"


async def unless_hanging(hangs: Ending, work: Any) -> Any:
    """The result of the work, which is cancelled when its engine is found to hang."""
    task, hanging = asyncio.ensure_future(work), asyncio.ensure_future(hangs.wait())
    try:
        await asyncio.wait({task, hanging}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()  # nothing where it is done
        return await task
    finally:
        for each in (task, hanging):
            each.cancel()
        await asyncio.gather(task, hanging, return_exceptions=True)


async def _wait_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def cause_of(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return "cannot connect"
    return "timeout" if isinstance(error, asyncio.TimeoutError) else "connection lost"


def words_of(error: BaseException) -> str:
    """For clients; what the library says is of chunks and headers."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"it cannot be reached: {error.os_error.strerror or error}"
    return "it has not answered in time" if isinstance(error, asyncio.TimeoutError) else "the connection to it was lost"


def _engine_error(event: bytes) -> str:
    """The message in the rest of an event that begins with `ERROR_EVENT`."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(b'{"error":' + event.split(b"\n\n")[0])["error"]["message"])
    return "it reported an error"


async def _send_start(send: Any, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_whole(
    send: Any, status: int, content: bytes, media: str = "application/json", extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    headers = [(b"content-type", media.encode()), (b"content-length", str(len(content)).encode()), *(extra or [])]
    await _send_start(send, status, headers)
    await send({"type": "http.response.body", "body": content, "more_body": False})
