"""Ports of this host: taken at once, or free ones."""

import socket

from sagellm.core.errors import ConfigError

__all__ = ["free_ports", "listen"]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        ConfigError: the port is in use, or the host is not an address of this machine.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # binding alone would let two share the port
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}. Choose another --port.") from None
    return listener


def free_ports(num: int, host: str = "127.0.0.1") -> list[int]:
    """Return distinct ports that are free now."""
    sockets = [listen(host, 0) for _ in range(num)]  # all at once, so that none comes twice
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
