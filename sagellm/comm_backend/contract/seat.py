"""One rank of a scenario: its number, a way into the group, and a way to report broken rules."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from sagellm.comm_backend.base import CommBackendProtocol
from sagellm.comm_backend.config import CommConfig
from sagellm.comm_backend.contract.witness import Witness
from sagellm.core.errors import CommError

__all__ = ["GROUP_S", "Facts", "Seat", "Task", "run_seat"]

GROUP_S = 5.0  # deadline of what is to succeed


class Task(NamedTuple):
    """One scenario, as a rank is told of it."""

    kind: type[CommBackendProtocol]
    scenario: str
    rank: int
    world_size: int
    rendezvous: str
    options: dict[str, Any]
    seed: int


class Facts(NamedTuple):
    """Observations of a rank. `values` are compared among ranks: name -> value."""

    reports: list[tuple[str, str]]
    seen: set[str]
    values: dict[str, Any]
    num_operations: int


class Seat(Witness):
    """One rank of a scenario. `random` is the same on all ranks."""

    refusal = CommError

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.rank, self.world_size, self.seed = task, task.rank, task.world_size, task.seed
        self.values: dict[str, Any] = {}
        self.is_thread = task.kind.schemes == ("memory",)
        self.random = torch.Generator().manual_seed(task.seed)
        self._opened: list[CommBackendProtocol] = []
        if self.device.index is not None:
            torch.cuda.set_device(self.device)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    @property
    def device(self) -> torch.device:
        kind = self.task.kind.device_types[0]
        is_gpu = kind == "cuda" and torch.cuda.device_count() > 0
        return torch.device(kind, self.rank % torch.cuda.device_count()) if is_gpu else torch.device(kind)

    def open(self, name: str = "", timeout_s: float | None = None, **changes: Any) -> CommBackendProtocol:
        """A group of all ranks; another `name` is another group."""
        config = CommConfig(
            backend=self.task.kind.name, rank=self.rank, rendezvous=self.task.rendezvous + name,
            timeout_s=timeout_s or GROUP_S,
            **{"world_size": self.world_size, "options": self.task.options, **changes},
        )  # fmt: skip
        backend = self.task.kind(config)
        self._opened.append(backend)
        return backend

    def tensor(self, values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.as_tensor(values).to(dtype).to(self.device)

    def report(self, rule: str, message: str) -> None:
        super().report(rule, f"rank {self.rank} of {self.world_size}: {message}")

    def expect(self, rule: str, found: torch.Tensor, expected: torch.Tensor, what: str, exact: bool = True) -> None:
        """`found` is `expected`, bit by bit or as near as a sum in any order comes."""
        self.seen.add(rule)
        is_same = found.shape == expected.shape and found.dtype == expected.dtype
        if is_same and exact:
            is_same = torch.equal(found, expected)
        elif is_same:
            tolerance = 0.05 if found.dtype is torch.bfloat16 else 1e-5
            is_same = torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=tolerance)
        if not is_same:
            self.report(rule, f"{what} gave {_short(found)}, and {_short(expected)} is right.")

    def close(self) -> Facts:
        for backend in self._opened:
            with suppress(Exception):
                backend.close()
        return Facts(self.reports, self.seen, self.values, self.num_operations)


def run_seat(task: Task, play: Callable[[Seat], None]) -> Facts:
    """One rank's part."""
    return Seat(task).play(play).close()


def _short(tensor: torch.Tensor) -> str:
    values = tensor.detach().reshape(-1)[:4].tolist()
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {values}"
