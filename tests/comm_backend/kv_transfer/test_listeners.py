"""Sockets of a library that are kept to the loopback interface."""

import os
import socket

from sagellm.comm_backend.kv_transfer import listeners
from sagellm.comm_backend.kv_transfer.listeners import kept_to_loopback


def device_of(sock):
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


def test_new_listeners_are_kept_and_older_ones_are_not():
    with socket.create_server(("", 0)) as older:
        with kept_to_loopback("a library"):
            newer = socket.create_server(("", 0))
            os.set_inheritable(newer.fileno(), True)
        with newer:
            assert device_of(newer) == b"lo" and not newer.get_inheritable()
            assert device_of(older) == b""


def test_a_socket_that_closes_meanwhile_is_left_out(monkeypatch):
    """Other threads of the process close sockets at any time."""
    found_at = listeners._sockets

    def and_a_closed_one():
        gone = os.dup(0)
        os.close(gone)
        return {gone: f"socket:[{gone}]"} | found_at()

    with kept_to_loopback("a library"):
        monkeypatch.setattr(listeners, "_sockets", and_a_closed_one)
        newer = socket.create_server(("", 0))
    with newer:
        assert device_of(newer) == b"lo"
