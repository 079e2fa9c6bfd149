"""Calls of LMDeploy's server to its engine process: how it waits for them, sends outputs of streams, and ends.

It has its counterparts in the server's process: streams whose outputs are sent, and calls that fail once the engine is dead.
"""

import asyncio
import itertools
import signal
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import zmq
from lmdeploy.pytorch.engine.mp_engine.base_worker import EngineOutputGather

from sagellm.core.errors import EngineError

LOOK_S = 1.0  # a server that is told to stop notices it within this time
DEAD_S = 0.2  # how often a call looks whether the process that should answer lives
STREAM = "sage_stream"  # the argument with which a client numbers a stream whose outputs it wants to be sent

__all__ = ["CallPoller", "OutputSender", "SentOutputs", "fail_when_dead"]


class CallPoller:
    """Waits for calls, where LMDeploy's own poller wakes a hundred times a second (4% of a core at rest).

    The file descriptor of a ZeroMQ socket reports a message once, and a send on the same socket takes the report away. A
    call that comes while an answer goes out would not be seen until the time is over. So every send ends the wait as well.

    LMDeploy's handler of SIGTERM raises `SystemExit` wherever the process happens to be, for example while a task sends an
    answer. This one raises it between two callbacks of the loop, once. Answers that come after the end are dropped.

    Args:
        server: An `AsyncRPCServer` of LMDeploy. Its `send_multipart` is wrapped.
    """

    def __init__(self, server: Any) -> None:
        self._socket: zmq.Socket = server.socket
        self._send = server.send_multipart
        self._news = asyncio.Event()
        server.send_multipart = self._send_and_wake
        self._ending = False
        if threading.current_thread() is threading.main_thread():  # only there can signals be handled
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._end)

    async def poll(self, timeout: float | None = None) -> list[tuple[zmq.Socket, int]]:
        """The socket if a call has come; empty after a send, and after `LOOK_S` seconds. `timeout` is not used."""
        self._news.clear()  # before the question, so that what comes after it counts
        if calls := self._calls():
            return calls
        loop, descriptor = asyncio.get_running_loop(), self._socket.fd
        loop.add_reader(descriptor, self._news.set)
        timer = loop.call_later(LOOK_S, self._news.set)
        try:
            await self._news.wait()
        finally:
            timer.cancel()
            loop.remove_reader(descriptor)
        return self._calls()

    def _calls(self) -> list[tuple[zmq.Socket, int]]:
        events = self._socket.get(zmq.EVENTS) & zmq.POLLIN
        return [(self._socket, events)] if events else []

    def _send_and_wake(self, *args: Any) -> None:
        if self._socket.closed:
            return
        self._send(*args)
        self._news.set()

    def _end(self) -> None:
        if not self._ending:
            self._ending = True
            raise SystemExit(0)


class OutputSender:
    """Sends the outputs of a stream as they come, where LMDeploy's client has to ask for each.

    A question wakes up two threads of each process, which take turns with the threads that compute. Outputs of one turn of the
    loop are one message: those of all sequences of a step, as a rule.

    Args:
        server: An `AsyncRPCServer` of LMDeploy. Calls of streams that `SentOutputs` has numbered come here.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._answer: Callable[..., None] = server.call_method_async
        self._outputs: dict[bytes, list[tuple[int, Any, str | None]]] = {}  # of each client, since the last message
        self._tasks: set[asyncio.Task] = set()
        server.call_method_async = self._call

    def _call(self, client: bytes, method: Callable[..., Any], request: dict[str, Any]) -> None:
        stream = request["kwargs"].pop(STREAM, None)
        if stream is None:
            self._answer(client, method, request)
            return
        # ZeroMQ drops messages above a limit, 1000 by default. It takes a new one for the connections that there are.
        self._server.socket.set(zmq.SNDHWM, 0)
        outputs = method(*request["args"], **request["kwargs"])
        task = asyncio.get_running_loop().create_task(self._run(client, stream, outputs), name=f"{request['method']}_{stream}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._server.send_multipart(client, {"success": True, "request_id": request["request_id"], "result": None})

    async def _run(self, client: bytes, stream: int, outputs: AsyncIterator[Any]) -> None:
        fault = ""
        try:
            async for output in outputs:
                self._add(client, (stream, output, None))
        except Exception as error:  # the client raises it
            fault = str(error) or type(error).__name__
        self._add(client, (stream, None, fault))

    def _add(self, client: bytes, output: tuple[int, Any, str | None]) -> None:
        """`output`: of a stream; or None, and why the stream is over, empty where nothing failed."""
        if not self._outputs:
            asyncio.get_running_loop().call_soon(self._send)
        self._outputs.setdefault(client, []).append(output)

    def _send(self) -> None:
        outputs, self._outputs = self._outputs, {}
        for client, each in outputs.items():
            self._server.send_multipart(client, {"outputs": each})


class SentOutputs:
    """Streams of a client whose outputs an `OutputSender` sends.

    Args:
        client: LMDeploy's `AsyncRPCClient`. Its streams begin here, and its messages come here.
    """

    def __init__(self, client: Any) -> None:
        self._client, self._set_reply = client, client._set_reply
        self._streams: dict[int, asyncio.Queue[tuple[Any, str | None]]] = {}
        self._numbers = itertools.count()
        client.async_stream_call, client._set_reply = self._call, self._take

    def _take(self, message: dict[str, Any]) -> None:
        if "outputs" not in message:
            self._set_reply(message)
            return
        for stream, output, fault in message["outputs"]:
            if stream in self._streams:  # otherwise its reader has left
                self._streams[stream].put_nowait((output, fault))

    async def _call(self, method: str, *args: Any, **options: Any) -> AsyncIterator[Any]:
        """Yield what the method does. Outputs that its reader has not taken yet are joined, as LMDeploy does."""
        stream, fault = next(self._numbers), None
        came = self._streams[stream] = asyncio.Queue()
        try:
            await self._client._async_call_impl(method, True, *args, **options, **{STREAM: stream})
            while fault is None:
                outputs = [await came.get()]
                while not came.empty():
                    outputs.append(came.get_nowait())
                fault = outputs[-1][1]
                if outputs := [output for output, end in outputs if end is None]:
                    yield _joined(outputs)
        finally:
            del self._streams[stream]
        if fault:
            raise EngineError(fault)


def _joined(outputs: list[Any]) -> Any:
    if len(outputs) > 1:
        joined = EngineOutputGather()
        for each in outputs:
            joined.add(0, each)
        joined.pop(0, outputs[-1])
    return outputs[-1]


def fail_when_dead(client: Any, process: Any) -> None:
    """Let calls that block fail once the process that should answer has ended.

    LMDeploy makes one every ten seconds on the server's event loop, for its log. A wait for ever there would keep the server
    from telling its clients of the death.

    Args:
        client: LMDeploy's `AsyncRPCClient`. The `recv` of its blocking socket is wrapped.
        process: as in `multiprocessing`.
    """
    socket, receive = client.sync_socket, client.sync_socket.recv

    def receive_from_living(*args: Any, **options: Any) -> Any:
        while not socket.poll(1000 * DEAD_S):
            if not process.is_alive():
                raise EngineError(f"the engine process has ended with code {process.exitcode}; its log says why.")
        return receive(*args, **options)

    socket.recv = receive_from_living
