"""Messages between two processes of one host: `shm` against a plain copy in one process, and against gloo on loopback."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.result import Definition
from sagellm.comm_backend import CommBackendProtocol
from sagellm.comm_backend.rank_processes import run_ranks
from sagellm.comm_backend.shm import ShmBackend
from sagellm.comm_backend.torch_groups import GlooBackend

OPTIONS: dict[str, Any] = {"mib": [1, 4, 16, 64], "total_mib": 64, "rounds": 20, "pings": 3000}
SIZES = (1, 4, 16, 64)
MIB = 1 << 20
BATCH = 32  # pings of one contestant before the next has its turn
DEFINITIONS = {
    f"comm_transfer_{name}_{size}mib": Definition(unit=unit, better=better, text=text.format(size=size))
    for size in SIZES
    for name, unit, better, text in (
        (
            "share", "1", "higher",
            "Bandwidth of messages of {size} MiB, `total_mib` in a row, from the sender's heap to ordinary memory of the "
            "receiver, as it sees them, all started at once, over that of as many `Tensor.copy_` by one thread of one process "
            "into the same memory. The median of `rounds` ratios, of contestants that follow each other in random order.",
        ),
        ("best_share", "1", "higher", "The same, of the best of `rounds` each: who had the cores all the time."),
        ("ring_share", "1", "higher", "The share where they lie in ordinary memory, and go through the ring."),
        ("over_gloo", "1", "higher", "Bandwidth of messages from the heap over that of gloo's, median of ratios."),
        ("ring_over_gloo", "1", "higher", "Bandwidth of messages through the ring over that of gloo's."),
        ("copy_gb_s", "GB/s", None, "`Tensor.copy_` of {size} MiB, at best."),
        ("gb_s", "GB/s", "higher", "Messages of {size} MiB from the heap, at best."),
    )
} | {
    f"comm_transfer_{name}_us": Definition(
        unit="us", better="lower",
        text=f"Half the time for a message of 8 bytes there and back, {text}, median.",
    )
    for name, text in (("control", "by `shm`"), ("gloo_control", "by gloo"))
}  # fmt: skip


def run(seed: int, mib: list[int], total_mib: int, rounds: int, pings: int) -> dict[str, float]:
    """Sizes that are not in `mib` are measured as 4 KiB."""
    options = {"shm": {"heap_bytes": 2 * 64 * MIB}}
    return run_ranks(_figures, ("shm", "gloo"), seed, mib, total_mib, rounds, pings, options=options)[1]


def _figures(
    backends: dict[str, CommBackendProtocol], seed: int, mib: list[int], total_mib: int, rounds: int, pings: int
) -> dict[str, float]:
    shm, own = backends["shm"], backends["gloo"]
    assert isinstance(shm, ShmBackend) and isinstance(own, GlooBackend)
    gloo = _Gloo(own.torch_group)
    metrics = _control(shm.rank, shm, gloo, pings)
    for size in SIZES:
        num_bytes, num_messages = (size * MIB, max(2, total_mib // size)) if size in mib else (4096, 2)
        metrics |= _sizes(shm.rank, shm, gloo, size, num_bytes, num_messages, rounds, seed)
    return metrics


class _Gloo:
    """Plain gloo, as torch has it."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, tensor: torch.Tensor, dst: int, async_op: bool = False) -> Any:
        return self._wait(self._group.send([tensor], dst, 0), async_op)

    def recv(self, tensor: torch.Tensor, src: int, async_op: bool = False) -> Any:
        return self._wait(self._group.recv([tensor], src, 0), async_op)

    def _wait(self, work: Any, async_op: bool) -> Any:
        return work if async_op else work.wait()


def _control(rank: int, shm: ShmBackend, gloo: _Gloo, pings: int) -> dict[str, float]:
    tensor = torch.zeros(8, dtype=torch.uint8)
    seconds: dict[str, list[float]] = {"control": [], "gloo_control": []}
    for _ in range(0, pings, BATCH):
        for name, group in (("control", shm), ("gloo_control", gloo)):
            for _ in range(BATCH):
                start = time.perf_counter()
                if rank == 0:
                    group.send(tensor, 1)
                    group.recv(tensor, 1)
                else:
                    group.recv(tensor, 0)
                    group.send(tensor, 0)
                seconds[name].append((time.perf_counter() - start) / 2)
    return {f"comm_transfer_{name}_us": float(np.median(taken)) * 1e6 for name, taken in seconds.items()}


def _sizes(
    rank: int, shm: ShmBackend, gloo: _Gloo, size: int, num_bytes: int, num_messages: int, rounds: int, seed: int
) -> dict[str, float]:
    """Rank 1 receives and measures; nothing has been sent when the clock starts."""
    own = torch.full((num_bytes,), rank + 1, dtype=torch.uint8)
    heap = shm.empty((num_bytes,), torch.uint8).fill_(rank + 1)
    target = torch.zeros(num_bytes, dtype=torch.uint8)

    def copies() -> None:
        for _ in range(num_messages if rank == 1 else 0):
            target.copy_(own)

    def messages(group: Any, source: torch.Tensor) -> Callable[[], None]:
        def send() -> None:
            works = [group.send(source, 1, async_op=True) for _ in range(num_messages)]
            for work in works:
                work.wait()

        def receive() -> None:
            for _ in range(num_messages):
                group.recv(target, 0)

        return receive if rank == 1 else send

    calls = [copies, messages(shm, heap), messages(shm, own), messages(gloo, own)]
    seconds: list[list[float]] = [[] for _ in calls]
    random = np.random.default_rng(seed)  # the same order on both ranks
    for number in range(rounds + 1):
        for place in random.permutation(len(calls)):
            target.zero_()
            shm.barrier()
            start = time.perf_counter()
            calls[place]()
            if number:  # the first touches memory for the first time
                seconds[place].append(time.perf_counter() - start)
            if rank == 1 and place:
                assert target[0] == target[-1] == 1
    copy, shared, ring, other = (np.array(taken) for taken in seconds)
    metrics = {
        "share": np.median(copy / shared),
        "best_share": copy.min() / shared.min(),
        "ring_share": np.median(copy / ring),
        "over_gloo": np.median(other / shared),
        "ring_over_gloo": np.median(other / ring),
        "copy_gb_s": num_bytes * num_messages / copy.min() / 1e9,
        "gb_s": num_bytes * num_messages / shared.min() / 1e9,
    }
    return {f"comm_transfer_{name}_{size}mib": float(value) for name, value in metrics.items()}
