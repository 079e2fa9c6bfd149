"""Cost of collectives and messages on this machine, by backend: latency and bandwidth over sizes, and overlap.

Sizes and bandwidths are those of NCCL's tests: see `sagellm.engines.lmdeploy.comm_stats`.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from sagellm.comm_backend.base import CommBackendProtocol
from sagellm.comm_backend.config import CommConfig
from sagellm.comm_backend.registry import find_backend, make_backend
from sagellm.comm_backend.topology import TopologyManager
from sagellm.core.errors import CommError

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
        JSON: `topology_s`, seconds to detect the topology; `copy_bytes_per_s`, by size, of each rank; `backends`, by name:
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
    begin = time.perf_counter()
    TopologyManager().detect()
    topology_s = time.perf_counter() - begin
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="sagellm-") as folder:
        answers, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, ranks, folder, tuple(backends), tuple(sizes), rounds, theirs)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            answers.append(ours)
            processes.append(process)
        try:
            found, *_ = [_answer(rank, ours) for rank, ours in enumerate(answers)]
        finally:
            for process in processes:
                process.join(10)
                process.kill()
                process.join()
    return {"ranks": ranks, "rounds": rounds, "topology_s": topology_s} | found


def _answer(rank: int, ours: Connection) -> Any:
    try:
        found = ours.recv() if ours.poll(LIMIT_S) else f"it has not answered within {LIMIT_S:g} s"
    except EOFError:
        found = "its process has ended"
    if isinstance(found, str):
        raise CommError(f"rank {rank} of the measurement failed: {found}.")
    return found


def _rank(
    rank: int, ranks: int, folder: str, names: Sequence[str], sizes: Sequence[int], rounds: int, answer: Connection
) -> None:
    torch.set_num_threads(1)
    backends: dict[str, CommBackendProtocol] = {}
    try:
        for number, name in enumerate(names):
            place = (Path(folder) / str(number)).as_uri()
            backends[name] = make_backend(CommConfig(backend=name, rank=rank, world_size=ranks, rendezvous=place))
        answer.send(_figures(rank, ranks, backends, sizes, rounds))
        for backend in backends.values():
            backend.barrier()
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")
    finally:
        for backend in backends.values():
            backend.close()


def _figures(
    rank: int, ranks: int, backends: dict[str, CommBackendProtocol], sizes: Sequence[int], rounds: int
) -> dict[str, Any]:
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
        found[name]["message_s"] = _messages(rank, backend)
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


def _messages(rank: int, backend: CommBackendProtocol) -> dict[str, float]:
    """Between ranks 0 and 1; the others wait."""
    tensor, times = torch.zeros(1, dtype=torch.int64), []
    for _ in range(PINGS if rank < 2 else 0):
        begin = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                backend.send(tensor, 1 - rank)
            else:
                backend.recv(tensor, 1 - rank)
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
    """Draw the bandwidth of all-reduce and all-gather over sizes, and that of a copy.

    Raises:
        CommError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: no global state, and no display
    except ImportError:
        raise CommError("a plot needs matplotlib, which is not installed: pip install matplotlib") from None
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("all_reduce", "all_gather"), strict=True):
        lines = {name: {size: each["bytes_per_s"] for size, each in found[kind].items()}
                 for name, found in result["backends"].items()}  # fmt: skip
        for name, values in (lines | {"copy": result["copy_bytes_per_s"]}).items():
            style = "k--" if name == "copy" else "o-"
            axes.plot([int(size) / 1024 for size in values], [each / 1e9 for each in values.values()], style, label=name)
        axes.set(xscale="log", yscale="log", title=f"{kind}, {result['ranks']} ranks", xlabel="KiB of a rank")
        axes.legend()
    figure.axes[0].set_ylabel("GB/s")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CommError(f"cannot write {path}: {error}.") from None
