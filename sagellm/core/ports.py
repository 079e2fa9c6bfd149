"""Ports of this host: the defaults of servers, ports taken at once, and free ones."""

import contextlib
import ipaddress
import secrets
import socket

from sagellm.core.errors import ConfigError

__all__ = ["SagePorts", "free_ports", "is_loopback", "listen"]


class SagePorts:
    """Default ports. `engines`: engines that a supervisor starts take free ones of these."""

    serve = 23333
    gateway = 23300
    proxy = 8000
    engines = range(12000, 20000)  # Linux takes 32768 and above for itself, IANA suggests 49152 and above


def is_loopback(host: str) -> bool:
    """Return whether other machines cannot reach this host. A name other than localhost may mean any: False."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        ConfigError: the port is in use, or the host is not an address of this machine.
    """
    # Named as TCP: asyncio sets TCP_NODELAY on connections of such a socket alone. Without it a token may wait for the
    # acknowledgement of the one before, up to 40 ms.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)  # binding alone would let two share the port
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}. Choose another --port.") from None
    return listener


def free_ports(num: int, host: str = "127.0.0.1") -> list[int]:
    """Return distinct ports that are free now.

    They lie outside the range from which the kernel takes ports for outgoing connections and for sockets bound to port 0.
    A port of that range could be gone before its server listens: a control connection of one engine has taken the
    HTTP port of another.
    """
    ports = SagePorts.engines
    start = secrets.randbelow(len(ports))
    found = []
    for port in (*ports[start:], *ports[:start]):
        if len(found) == num:
            break
        with contextlib.suppress(ConfigError):
            listen(host, port).close()
            found.append(port)
    if len(found) < num:
        raise ConfigError(f"only {len(found)} of the ports {ports[0]} to {ports[-1]} are free; {num} are needed.")
    return found
