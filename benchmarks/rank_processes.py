"""Ranks of a scenario as processes of their own."""

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.errors import BenchmarkError
from sagellm.comm_backend import CommBackendProtocol, CommConfig
from sagellm.comm_backend.registry import make_backend

LIMIT_S = 900.0


def run_ranks(body: Callable[..., Any], backends: tuple[str, ...], *arguments: Any, world_size: int = 2) -> list[Any]:
    """Return the results of `body({name: backend}, *arguments)` on each rank, with one thread of torch a rank.

    Raises BenchmarkError: a rank died or did not answer.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="sagellm-ranks-") as folder:
        ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(body, rank, world_size, folder, backends, arguments, theirs))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return [_answer(rank, ours) for rank, (_, ours) in enumerate(ranks)]
        finally:
            for process, _ in ranks:
                process.join(60)
                process.kill()


def _answer(rank: int, ours: Connection) -> Any:
    if not ours.poll(LIMIT_S):
        raise BenchmarkError(f"rank {rank} has not answered within {LIMIT_S:g} s")
    try:
        return ours.recv()
    except EOFError:
        raise BenchmarkError(f"rank {rank} died; its words are above") from None


def _rank(
    body: Callable[..., Any], rank: int, world_size: int, folder: str, names: tuple[str, ...], arguments: tuple[Any, ...],
    answer: Connection,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    backends: dict[str, CommBackendProtocol] = {}
    for name in names:
        place = f"file://{folder}/{name}"
        backends[name] = make_backend(CommConfig(backend=name, rank=rank, world_size=world_size, rendezvous=place))
    answer.send(body(backends, *arguments))
    for backend in backends.values():
        backend.barrier()
        backend.close()
