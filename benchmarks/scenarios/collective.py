"""An all-reduce of two workers as the engine's native step asks for it, beside a copy of as many bytes."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.result import Definition
from sagellm.comm_backend import CommBackendProtocol
from sagellm.comm_backend.rank_processes import run_ranks

OPTIONS: dict[str, Any] = {"backend": "shm", "kib": 64, "rounds": 40, "operations": 64, "slower": 0.0}
DEFINITIONS = {
    "collective_us": Definition(
        unit="us", better="lower",
        text=(
            "Time of an all-reduce of `kib` KiB of float32 between two processes of one host by `backend`, on the slower rank: "
            "the median of `rounds` medians of `operations` each. `slower` plants a fault: each one takes so much longer."
        ),
    ),
    "collective_vs_copy": Definition(
        unit="1", better="lower",
        text="That time over the time of a copy of as many bytes, in turn with it: the median of the rounds' ratios.",
    ),
    "collective_bandwidth_share": Definition(
        unit="ratio", better=None, text="Bandwidth utilisation: bytes of the tensor a second over those of a copy."
    ),
}  # fmt: skip


def run(seed: int, backend: str, kib: int, rounds: int, operations: int, slower: float) -> dict[str, float]:
    ranks = run_ranks(_measure, (backend,), kib, rounds, operations, slower)
    times, ratios = max(ranks, key=lambda rank: statistics.median(rank[0]))
    ratio = statistics.median(ratios)
    return {
        "collective_us": statistics.median(times) * 1e6, "collective_vs_copy": ratio, "collective_bandwidth_share": 1 / ratio,
    }  # fmt: skip


def _measure(
    backends: dict[str, CommBackendProtocol], kib: int, rounds: int, operations: int, slower: float
) -> tuple[list[float], list[float]]:
    """Seconds of an all-reduce, and over those of a copy, the median of each round."""
    (backend,) = backends.values()
    tensor = torch.zeros(kib << 8)
    target, wait_s = torch.empty_like(tensor), 0.0

    def add_up() -> None:
        backend.all_reduce(tensor)
        end_s = time.perf_counter() + wait_s
        while time.perf_counter() < end_s:
            pass

    wait_s = slower * _median_s(backend, add_up, 10 * operations)
    times, ratios = [], []
    for _ in range(rounds):
        copy_s = _median_s(backend, lambda: target.copy_(tensor), operations)
        times.append(_median_s(backend, add_up, operations))
        ratios.append(times[-1] / copy_s)
    return times, ratios


def _median_s(backend: CommBackendProtocol, work: Callable[[], object], count: int) -> float:
    backend.barrier()
    times = []
    for _ in range(count):
        begin_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)
