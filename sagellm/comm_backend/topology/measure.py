"""Timings of the machine itself: copies within and between NUMA nodes, and TCP on loopback."""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from sagellm.comm_backend.topology.base import Measurement, NumaNode
from sagellm.core.errors import CommError

__all__ = ["measure_loopback", "measure_memory"]

Result = TypeVar("Result")
ROUNDS = 5
PINGS = 200
TIMEOUT_S = 30.0


def measure_memory(nodes: Sequence[NumaNode], num_bytes: int) -> tuple[list[Measurement], list[str]]:
    """Copies by one thread on the node that receives, of pages that a thread of each node touched first.

    The best of five: others on the machine only ever make a copy slower. Nodes without CPUs, or of CPUs that this process may
    not use, become notes.
    """
    allowed = os.sched_getaffinity(0)
    usable = {node.name: allowed & set(node.cpus) for node in nodes}
    notes = [f"{name}: no CPU that this process may use; not measured" for name, cpus in usable.items() if not cpus]
    names = [name for name, cpus in usable.items() if cpus]
    found = []
    for a in names:
        source = _pinned(usable[a], lambda: _touched(num_bytes))
        for b in names:
            seconds = _pinned(usable[b], lambda source=source: _copy_seconds(source, num_bytes))
            found.append(Measurement(a=a, b=b, bytes_per_s=num_bytes / seconds, num_bytes=num_bytes))
    return found, notes


def measure_loopback(num_bytes: int) -> Measurement:
    """Raises CommError: no TCP on 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(TIMEOUT_S)
            with socket.create_connection(server.getsockname(), timeout=TIMEOUT_S) as client:
                peer, _ = server.accept()
                with peer:
                    return _over(client, peer, num_bytes)
    except OSError as error:
        raise CommError(f"TCP on loopback cannot be measured: {error}.") from error


def _over(client: socket.socket, peer: socket.socket, num_bytes: int) -> Measurement:
    for end in (client, peer):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(TIMEOUT_S)
    answers = threading.Thread(target=_answer, args=(peer, num_bytes), daemon=True)
    answers.start()
    trips = []
    for _ in range(PINGS):
        start = time.perf_counter()
        client.sendall(b"p")
        _receive(client, 1)
        trips.append(time.perf_counter() - start)
    start = time.perf_counter()
    client.sendall(memoryview(bytes(num_bytes)))
    _receive(client, 1)
    seconds = time.perf_counter() - start
    answers.join(TIMEOUT_S)
    latency_s = sorted(trips)[PINGS // 2] / 2
    return Measurement(a="lo", b="lo", bytes_per_s=num_bytes / seconds, latency_s=latency_s, num_bytes=num_bytes)


def _answer(peer: socket.socket, num_bytes: int) -> None:
    try:
        for _ in range(PINGS):
            _receive(peer, 1)
            peer.sendall(b"p")
        _receive(peer, num_bytes)
        peer.sendall(b"p")
    except OSError:
        pass  # the other end says what went wrong


def _receive(end: socket.socket, num_bytes: int) -> None:
    buffer = bytearray(min(num_bytes, 1 << 18))
    while num_bytes:
        count = end.recv_into(buffer, min(num_bytes, len(buffer)))
        if not count:
            raise OSError("the other end has gone")
        num_bytes -= count


def _touched(num_bytes: int) -> np.ndarray:
    """Fresh pages, which belong to the node of the thread that first writes to them."""
    array = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    array.fill(1)
    return array


def _copy_seconds(source: np.ndarray, num_bytes: int) -> float:
    target = _touched(num_bytes)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)


def _pinned(cpus: set[int], work: Callable[[], Result]) -> Result:
    """Return the result of `work` on a thread that runs on these CPUs alone."""
    answers: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            os.sched_setaffinity(0, cpus)
            answers.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise CommError(f"cannot measure on CPUs {sorted(cpus)}: {errors[0]}.") from errors[0]
    return answers[0]
