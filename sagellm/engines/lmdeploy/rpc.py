"""Calls of LMDeploy's server to its engine process: how that waits for them and ends, and what becomes of them if it dies."""

import asyncio
import signal
import threading
from typing import Any

import zmq

from sagellm.core.errors import EngineError

LOOK_S = 1.0  # a server that is told to stop notices it within this time
DEAD_S = 0.2  # how often a call looks whether the process that should answer lives

__all__ = ["CallPoller", "fail_when_dead"]


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
