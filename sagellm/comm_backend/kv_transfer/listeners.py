"""Sockets that a library listens on at every address of the machine, kept to the loopback interface."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sagellm.core.errors import TransferError
from sagellm.core.ports import is_loopback

__all__ = ["kept_to_loopback"]


@contextmanager
def kept_to_loopback(library: str) -> Iterator[None]:
    """Sockets that begin to listen inside take connections of this machine only, and are not inherited by other programs.

    Sockets that other threads open meanwhile at every address are changed too, so this is kept short. A socket listens
    for a moment before it is kept to loopback: nothing may be offered through it before this has ended.

    Raises:
        TransferError: the kernel does not do it.
    """
    before = set(_sockets().values())
    yield
    for fd, inode in _sockets().items():
        if inode in before:
            continue
        try:
            found = socket.socket(fileno=os.dup(fd))
        except OSError:  # another thread has closed it meanwhile
            continue
        with found:
            if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            with suppress(OSError):
                os.set_inheritable(fd, False)
            if is_loopback(found.getsockname()[0]):
                continue
            try:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
            except OSError as error:
                raise TransferError(
                    f"{library} listens at {found.getsockname()[0]}, and the kernel does not keep it to loopback ({error}), "
                    "which takes Linux 5.7. Give the channel an address of this machine as `host`, if others may reach it."
                ) from None


def _sockets() -> dict[int, str]:
    """File descriptors of this process that are internet sockets, and what the kernel calls those."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6):
                        found[int(name)] = target
        except OSError:  # closed meanwhile
            continue
    return found
