"""Limits of this package's servers for clients of their ports, with the key of the group or without it."""

import socket
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Strangers", "keep_alive"]

One = TypeVar("One")


class Strangers(Generic[One]):
    """Those who have not yet shown that they know the key. If all places are taken, a new client replaces the oldest
    one. An honest peer needs milliseconds, so silent clients cannot block the others.

    Not for several threads at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ones: dict[One, None] = {}  # in the order in which they came

    def __contains__(self, one: One) -> bool:
        return one in self._ones

    def __iter__(self) -> Iterator[One]:
        return iter(self._ones)

    def add(self, one: One) -> One | None:
        """Returns who gives way, and is to be cut off; it is not among them any more."""
        oldest = next(iter(self._ones)) if len(self._ones) >= self._limit else None
        if oldest is not None:
            del self._ones[oldest]
        self._ones[one] = None
        return oldest

    def remove(self, one: One) -> bool:
        """Whether it was still among them."""
        if one not in self._ones:
            return False
        del self._ones[one]
        return True


def keep_alive(connection: socket.socket) -> None:
    """Notice a host that has gone without a word within half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
