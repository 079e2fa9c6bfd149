"""Addresses as text, host:port, and sockets of control connections."""

import asyncio

from sagellm.comm_backend.open_ports import keep_alive
from sagellm.core.errors import ConfigError

__all__ = ["join_address", "prepare", "split_address"]


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Raises:
    ConfigError: not host:port, or [host]:port for IPv6.
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"{address!r} is not an address; give host:port, with brackets around an IPv6 host.")
    return host, int(port)


def prepare(writer: asyncio.StreamWriter) -> str:
    """Have it kept alive; asyncio itself sets TCP_NODELAY. Returns the other side's address."""
    keep_alive(writer.get_extra_info("socket"))
    name = writer.get_extra_info("peername")
    return join_address(*name[:2]) if name else "a peer that has gone"
