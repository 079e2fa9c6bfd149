"""Time that our `gloo` backend adds to an operation of gloo's, between two processes of one host."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.result import Definition
from sagellm.comm_backend import CommBackendProtocol
from sagellm.comm_backend.rank_processes import run_ranks
from sagellm.comm_backend.torch_groups import GlooBackend

OPTIONS: dict[str, Any] = {"kib": [4, 64, 1024], "rounds": 60, "operations": 32, "gap_us": 100.0}
SIZES = (4, 64, 1024)
KINDS = {"all_reduce": "A reduction", "messages": "A message there and one back"}
TAG = 1
DEFINITIONS = {
    f"comm_overhead_{kind}_{name}{size}kib": Definition(unit=unit, better=better, text=f"{what} of {size} KiB: {text}")
    for kind, what in KINDS.items()
    for size in SIZES
    for name, unit, better, text in (
        (
            "", "1", "lower",
            "its time with our backend over that of the same call of torch's own group, over the same connections, on the "
            "slower rank. The median of `rounds` ratios of the medians of `operations` each, in random order. Up to `gap_us` "
            "of other work lie before each, as in a model: of two that follow at once the second finds the threads of gloo "
            "still awake or just asleep, which decides between 20 and 60 us.",
        ),
        ("same_", "1", None, "ratio of torch's own group with itself, which shows the noise of the machine."),
        ("us_", "us", None, "time by torch's own group, median."),
    )
}  # fmt: skip


def run(seed: int, kib: list[int], rounds: int, operations: int, gap_us: float) -> dict[str, float]:
    """Sizes that are not in `kib` are measured in two rounds."""
    ranks = run_ranks(_measure, ("gloo",), seed, kib, rounds, operations, gap_us * 1e-6)
    metrics = {}
    for kind, size in ranks[0]:
        ours, raw, again = np.maximum(*(np.array(of[kind, size]) for of in ranks))
        metrics[f"comm_overhead_{kind}_{size}kib"] = float(np.median(ours / raw))
        metrics[f"comm_overhead_{kind}_same_{size}kib"] = float(np.median(again / raw))
        metrics[f"comm_overhead_{kind}_us_{size}kib"] = float(np.median(raw)) * 1e6
    return metrics


def _measure(
    backends: dict[str, CommBackendProtocol], seed: int, kib: list[int], rounds: int, operations: int, gap_s: float
) -> dict[tuple[str, int], list[list[float]]]:
    """Seconds of an operation, the median of each round, of each contestant."""
    backend = backends["gloo"]
    assert isinstance(backend, GlooBackend)
    random = np.random.default_rng(seed)  # the same order and the same gaps on both ranks
    found = {}
    for kind, contestants in {"all_reduce": _reductions, "messages": _messages}.items():
        for size in SIZES:
            ours, raw = contestants(backend, torch.zeros(size << 8))
            calls = [ours, raw, raw]
            seconds: list[list[float]] = [[] for _ in calls]
            for number in range((rounds if size in kib else 2) + 1):
                for place in random.permutation(len(calls)):
                    backend.barrier()
                    taken = [_timed(calls[place], gap) for gap in random.uniform(0, gap_s, operations)]
                    if number:  # the first touches memory for the first time
                        seconds[place].append(float(np.median(taken)))
            found[kind, size] = seconds
    return found


def _timed(call: Callable[[], None], gap_s: float) -> float:
    begin = time.perf_counter() + gap_s
    while time.perf_counter() < begin:
        pass
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _reductions(backend: GlooBackend, tensor: torch.Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    group = backend.torch_group

    def ours() -> None:
        backend.all_reduce(tensor)

    def raw() -> None:
        group.allreduce([tensor]).wait()

    return ours, raw


def _messages(backend: GlooBackend, tensor: torch.Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    group, other = backend.torch_group, 1 - backend.rank

    def ours() -> None:
        for call in (backend.send, backend.recv) if backend.rank == 0 else (backend.recv, backend.send):
            call(tensor, other)

    def raw() -> None:
        for call in (group.send, group.recv) if backend.rank == 0 else (group.recv, group.send):
            call([tensor], other, TAG).wait()

    return ours, raw
