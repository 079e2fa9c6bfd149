"""Ranks as processes of their own, for measurements."""

import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from sagellm.comm_backend.base import CommBackendProtocol
from sagellm.comm_backend.config import CommConfig
from sagellm.comm_backend.registry import make_backend
from sagellm.core.errors import CommError

__all__ = ["run_ranks"]

LIMIT_S = 900.0
END_S = 60.0


def run_ranks(
    body: Callable[..., Any], backends: Sequence[str], *arguments: Any, world_size: int = 2, limit_s: float = LIMIT_S,
    options: Mapping[str, dict[str, Any]] | None = None,
) -> list[Any]:  # fmt: skip
    """Return the results of `body({name: backend}, *arguments)` on each rank, with one thread of torch a rank.

    Args:
        backends: names or `module:Class`.
        options: of backends, by name.

    Raises:
        CommError: a rank failed, died, or did not answer within `limit_s`.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="sagellm-ranks-") as folder:
        ranks = []
        for rank in range(world_size):
            configs = {
                name: CommConfig(
                    backend=name, rank=rank, world_size=world_size, rendezvous=(Path(folder) / str(number)).as_uri(),
                    options=(options or {}).get(name, {}),
                )
                for number, name in enumerate(backends)
            }  # fmt: skip
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(body, configs, arguments, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return [_answer(rank, ours, limit_s) for rank, (_, ours) in enumerate(ranks)]
        finally:
            for process, _ in ranks:
                process.join(END_S)
                process.kill()
                process.join()


def _answer(rank: int, ours: Connection, limit_s: float) -> Any:
    found, fault = None, f"it has not answered within {limit_s:g} s"
    try:
        if ours.poll(limit_s):
            found, fault = ours.recv()
    except EOFError:
        fault = "its process has ended"
    if fault:
        raise CommError(f"rank {rank} of the measurement failed: {fault}.")
    return found


def _rank(
    body: Callable[..., Any], configs: dict[str, CommConfig], arguments: tuple[Any, ...], answer: Connection
) -> None:
    torch.set_num_threads(1)
    backends: dict[str, CommBackendProtocol] = {}
    try:
        for name, config in configs.items():
            backends[name] = make_backend(config)
        answer.send((body(backends, *arguments), ""))
        for backend in backends.values():
            backend.barrier()
    except Exception as error:
        answer.send((None, f"{type(error).__name__}: {error}"))
    finally:
        for backend in backends.values():
            backend.close()
