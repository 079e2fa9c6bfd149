"""Adjacent small reductions with buckets and without, between two processes of one host."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.result import Definition
from sagellm.comm_backend import CommBackendProtocol, CommFusion
from sagellm.comm_backend.rank_processes import run_ranks

OPTIONS: dict[str, Any] = {"kib": [1, 4, 16, 64, 256], "tensors": 16, "rounds": 40, "bucket_kib": 256}
SIZES = (1, 4, 16, 64, 256)
BACKENDS = ("gloo", "shm")
DEFINITIONS = {
    f"comm_fusion_{backend}_{name}_{size}kib": Definition(
        unit=unit, better=better, text=text.format(size=size, backend=backend)
    )
    for backend in BACKENDS
    for size in SIZES
    for name, unit, better, text in (
        (
            "gain", "1", "higher",
            "Time of `tensors` reductions of {size} KiB in float32 over {backend}, all started and then waited for, over that "
            "of the same through `CommFusion` with buckets of `bucket_kib`. The median of `rounds` ratios, of contestants that "
            "follow each other in random order, on the slower rank.",
        ),
        ("gain_waiting", "1", "higher", "The ratio of `gain`, with each reduction waited for before the next is started."),
        ("us", "us", "lower", "Time of one reduction of {size} KiB through `CommFusion` over {backend}, median."),
    )
}  # fmt: skip


def run(seed: int, kib: list[int], tensors: int, rounds: int, bucket_kib: int) -> dict[str, float]:
    """Sizes that are not in `kib` are measured in two rounds."""
    ranks = run_ranks(_measure, BACKENDS, seed, kib, tensors, rounds, bucket_kib << 10)
    metrics = {}
    for name in ranks[0]:
        apart, waiting, fused = np.maximum(*(np.array(of[name]) for of in ranks))
        backend, size = name
        metrics[f"comm_fusion_{backend}_gain_{size}kib"] = float(np.median(apart / fused))
        metrics[f"comm_fusion_{backend}_gain_waiting_{size}kib"] = float(np.median(waiting / fused))
        metrics[f"comm_fusion_{backend}_us_{size}kib"] = float(np.median(fused)) / tensors * 1e6
    return metrics


def _measure(
    backends: dict[str, CommBackendProtocol], seed: int, kib: list[int], tensors: int, rounds: int, bucket_bytes: int
) -> dict[tuple[str, int], list[list[float]]]:
    """Seconds of each contestant in each round."""
    random = np.random.default_rng(seed)  # the same order on both ranks
    found = {}
    for name, backend in backends.items():
        fusion = CommFusion(backend, bucket_bytes=bucket_bytes)
        for size in SIZES:
            rows = [torch.ones(size << 8) for _ in range(tensors)]
            calls = [_started(backend, rows), _waited(backend, rows), _started(fusion, rows)]
            seconds: list[list[float]] = [[] for _ in calls]
            for number in range((rounds if size in kib else 2) + 1):
                for place in random.permutation(len(calls)):
                    for row in rows:
                        row.fill_(1.0)
                    backend.barrier()
                    start = time.perf_counter()
                    calls[place]()
                    if number:  # the first touches memory for the first time
                        seconds[place].append(time.perf_counter() - start)
                    assert all(row[0] == row[-1] == backend.world_size for row in rows)
            found[name, size] = seconds
    return found


def _started(backend: CommBackendProtocol, rows: list[torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        works = [backend.all_reduce(row, async_op=True) for row in rows]
        for work in works:
            assert work is not None
            work.wait()

    return run


def _waited(backend: CommBackendProtocol, rows: list[torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        for row in rows:
            backend.all_reduce(row)

    return run
