"""This machine as the tests use it: ports that stay free until a server has them, and what processes are called."""

import os
import secrets
import socket

import psutil

# Below the ports that the kernel gives to outgoing connections (from 32768 on), where one that was just found free may be
# taken again before the server comes. Each worker of a run has its own range, and begins somewhere in it, so that two runs
# on one machine do not meet either.
_FIRST, _RANGE, _NUM_RANGES = 20000, 2000, 6
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_RANGES
_next = secrets.randbelow(_RANGE)


def free_port() -> int:
    """A port that nobody has, on any address; never the same one twice, until the range is through."""
    global _next
    for _ in range(_RANGE):
        port = _FIRST + _RANGE * _worker + _next
        _next = (_next + 1) % _RANGE
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise RuntimeError(f"none of {_RANGE} ports is free")


def command_line(process: psutil.Process) -> str:
    """Empty for one that has ended or is about to."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
