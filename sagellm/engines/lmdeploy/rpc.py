"""The wait of LMDeploy's engine process for the calls of its server, and its end."""

import asyncio
import signal
import threading
from typing import Any

import zmq

LOOK_S = 1.0  # a server that is told to stop notices it within this time

__all__ = ["CallPoller"]


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
