"""Cost of collectives and messages on this machine, by backend: latency and bandwidth over sizes, and overlap.

Sizes and bandwidths are those of NCCL's tests: see `sagellm.engines.lmdeploy.comm_stats`.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sagellm.comm_backend.base import CommBackendProtocol
from sagellm.comm_backend.rank_processes import run_ranks
from sagellm.comm_backend.registry import find_backend
from sagellm.comm_backend.topology import Candidates, Seat, TopologyManager
from sagellm.comm_backend.topology.placement import available_cores
from sagellm.core.collectives import GROUP
from sagellm.core.errors import CommError
from sagellm.core.figure import new_figure, save_figure

__all__ = ["SIZES", "measure", "write_plot"]

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
LIMIT_S = 300.0
COPY = "copy"
PINGS, OVERLAPPED_BYTES = 500, 1 << 20
LEAST_A_TURN, MOST_A_TURN, TURN_BYTES = 10, 50, 8 << 20


def measure(
    backends: Sequence[str], ranks: int = 2, sizes: Sequence[int] = SIZES, rounds: int = 20
) -> dict[str, Any]:
    """Measure backends in turn, with processes of one thread.

    Args:
        backends: names or `module:Class`.
        sizes: bytes of a rank's tensor.
        rounds: how often each backend has its turn at each size.

    Returns:
        JSON: `topology_s`, seconds to detect the topology; `candidates` and `reason`, of `TopologyManager.candidates` for ranks
        on these cores; `chosen`, of these the quicker one of each collective, if all were measured, where `group` is gloo;
        `copy_bytes_per_s`, by size, of each rank; `backends`, by name:
        `all_reduce` and `all_gather`, by size, with `p50_s`, `p99_s` and `bytes_per_s` of the whole; `message_s`, half the time
        of 8 bytes there and back; `hidden`, the share of an all-reduce of 1 MiB that a computation as long hides. A share is
        negative where both together take longer than one after the other.

    Raises:
        CommError: a backend is unknown or does not work between processes here; a rank failed.
    """
    for name in backends:
        kind = find_backend(name)
        if "file" not in kind.schemes or "cpu" not in kind.device_types or kind.missing():
            raise CommError(f"{name} does not work here between processes on the CPU; give shm, gloo, or module:Class.")
    begin, manager = time.perf_counter(), TopologyManager()
    manager.detect()
    topology_s = time.perf_counter() - begin
    candidates = manager.candidates([Seat("", tuple(available_cores()))] * ranks)
    found, *_ = run_ranks(_figures, tuple(backends), tuple(sizes), rounds, world_size=ranks, limit_s=LIMIT_S)
    return {
        "ranks": ranks, "rounds": rounds, "topology_s": topology_s, "candidates": candidates.backends,
        "reason": candidates.reason, "chosen": _chosen(candidates, found["backends"]),
    } | found  # fmt: skip


def _chosen(candidates: Candidates, found: dict[str, Any]) -> dict[str, str]:
    """Return the quicker backend of each collective as `--comm-backend auto` chooses: in the mean of all sizes."""
    by_name = {name: found.get("gloo" if name == GROUP else name) for name in candidates.backends}
    if None in by_name.values():
        return {}
    products = {
        kind: {name: math.prod(each["p50_s"] for each in one[kind].values()) for name, one in by_name.items()}
        for kind in ("all_reduce", "all_gather")
    }
    return {kind: min(times, key=times.__getitem__) for kind, times in products.items()}


def _figures(backends: dict[str, CommBackendProtocol], sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    ranks = next(iter(backends.values())).world_size
    copies: dict[str, float] = {}
    found: dict[str, dict[str, Any]] = {name: {"all_reduce": {}, "all_gather": {}} for name in backends}
    for size in sizes:
        tensor = torch.zeros(max(1, size // 4))
        output, copied = torch.empty(ranks, *tensor.shape), torch.empty_like(tensor)
        for kind in ("all_reduce", "all_gather"):
            calls: dict[str, Callable[[], object]] = {}
            for name, backend in backends.items():
                calls[name] = _bound(backend, kind, output, tensor)
            if kind == "all_reduce":
                calls[COPY] = partial(copied.copy_, tensor)
            times = _in_turn(backends, calls, size, rounds)
            if kind == "all_reduce":
                copies[str(size)] = size / statistics.median(times.pop(COPY))
            for name, each in times.items():
                found[name][kind][str(size)] = _summary(each, size if kind == "all_reduce" else size * ranks)
    for name, backend in backends.items():
        found[name]["message_s"] = _messages(backend)
        found[name]["hidden"] = _hidden(backend)
    return {"copy_bytes_per_s": copies, "backends": found}


def _bound(backend: CommBackendProtocol, kind: str, output: torch.Tensor, tensor: torch.Tensor) -> Callable[[], object]:
    return (lambda: backend.all_reduce(tensor)) if kind == "all_reduce" else (lambda: backend.all_gather(output, tensor))


def _in_turn(
    backends: dict[str, CommBackendProtocol], calls: dict[str, Callable[[], object]], size: int, rounds: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    first = next(iter(backends.values()))
    for number in range(rounds + 1):  # the first one warms up
        for name, call in calls.items():
            first.barrier()
            for _ in range(max(LEAST_A_TURN, min(MOST_A_TURN, TURN_BYTES // size))):
                begin = time.perf_counter()
                call()
                if number:
                    times[name].append(time.perf_counter() - begin)
    return times


def _summary(times: list[float], num_bytes: int) -> dict[str, float]:
    median = statistics.median(times)
    return {"p50_s": median, "p99_s": _p99(times), "bytes_per_s": num_bytes / median}


def _p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, round(0.99 * len(times)))]


def _messages(backend: CommBackendProtocol) -> dict[str, float]:
    """Between ranks 0 and 1; the others wait."""
    tensor, times = torch.zeros(1, dtype=torch.int64), []
    for _ in range(PINGS if backend.rank < 2 else 0):
        begin = time.perf_counter()
        for sender in (0, 1):
            if backend.rank == sender:
                backend.send(tensor, 1 - backend.rank)
            else:
                backend.recv(tensor, 1 - backend.rank)
        times.append((time.perf_counter() - begin) / 2)
    backend.barrier()
    return {"p50_s": statistics.median(times), "p99_s": _p99(times)} if times else {}


def _hidden(backend: CommBackendProtocol) -> float:
    tensor, square = torch.zeros(OVERLAPPED_BYTES // 4), torch.ones(96, 96)
    alone = _median_s(backend, lambda: backend.all_reduce(tensor))
    product = _median_s(backend, lambda: square @ square)
    agreed = torch.tensor([alone / product])
    backend.broadcast(agreed, 0)
    num_products = max(1, int(agreed[0]))

    def compute() -> None:
        for _ in range(num_products):
            square @ square

    def both() -> None:
        work = backend.all_reduce(tensor, async_op=True)
        compute()
        work.wait()

    computed, together = _median_s(backend, compute), _median_s(backend, both)
    return (alone + computed - together) / min(alone, computed)


def _median_s(backend: CommBackendProtocol, call: Callable[[], object]) -> float:
    times = []
    for _ in range(15):
        backend.barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Draw the bandwidth of all-reduce and all-gather over sizes, that of a copy, and times of messages.

    Raises:
        CommError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(13, 4, CommError)
    reduced, gathered, messages = figure.subplots(1, 3)
    gathered.sharey(reduced)
    for axes, kind in ((reduced, "all_reduce"), (gathered, "all_gather")):
        lines = {name: {size: each["bytes_per_s"] for size, each in found[kind].items()}
                 for name, found in result["backends"].items()}  # fmt: skip
        for name, values in (lines | {"copy": result["copy_bytes_per_s"]}).items():
            style = "k--" if name == "copy" else "o-"
            axes.plot([int(size) / 1024 for size in values], [each / 1e9 for each in values.values()], style, label=name)
        axes.set(xscale="log", yscale="log", title=f"{kind}, {result['ranks']} ranks", xlabel="KiB of a rank")
        axes.legend()
    reduced.set_ylabel("GB/s")
    labels = [f"{name}\nhidden {found['hidden']:.0%}" for name, found in result["backends"].items()]
    for offset, key in ((-0.2, "p50_s"), (0.2, "p99_s")):
        times = [1e6 * found["message_s"][key] for found in result["backends"].values()]
        messages.bar([place + offset for place in range(len(labels))], times, 0.4, label=key.removesuffix("_s"))
    messages.set_xticks(range(len(labels)), labels)
    messages.set(title="message of 8 bytes, overlap of 1 MiB", ylabel="us", yscale="log")
    messages.legend()
    save_figure(figure, path, CommError)
