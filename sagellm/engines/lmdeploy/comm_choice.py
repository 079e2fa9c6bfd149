"""Which backend does a collective of the workers, and in how many pieces: decided once for each sort of collective.

A plug-in's `comm_decide` is asked on rank 0, and its answer holds on all ranks. Otherwise `comm_backend` does what it can. With
"auto" that is the quicker one of the process group and shared memory, as measured at the start.
"""

import logging
import math
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sagellm.comm_backend.base import CommBackendProtocol
from sagellm.comm_backend.config import CommConfig
from sagellm.comm_backend.registry import make_backend
from sagellm.comm_backend.shm import ShmBackend
from sagellm.core.collectives import GROUP, MAX_PIECES, CommDecision, CommRequest
from sagellm.core.errors import CommError
from sagellm.core.host import PluginHost

__all__ = ["AUTO", "CommChoice", "join"]

logger = logging.getLogger("sagellm")

AUTO = "auto"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# How long a worker looks for the others before it sleeps. They come within some hundred microseconds, and to be woken takes a
# hundred.
STEP_SPIN_US = 2000.0
MEASURED_BYTES, MEASURED_TIMES = (4 << 10, 64 << 10, 1 << 20), 15
# Collectives that a backend may do, with the names of their arguments in torch.distributed.
ARGUMENTS = {
    "all_reduce": ("tensor", "op", "group", "async_op"),
    "broadcast": ("tensor", "src", "group", "async_op"),
    "all_gather": ("tensor_list", "tensor", "group", "async_op"),
}


def join(
    name: str | None, device: str, rank: int, world_size: int, options: dict[str, Any] | None = None
) -> CommBackendProtocol | None:
    """Make this worker's part of a backend's group. All workers come here at the same time.

    Args:
        name: a backend, or "auto".

    Returns:
        None without a name, or if "auto" finds no backend for processes of one host that works here on all ranks.

    Raises:
        CommError: a backend that was named does not work.
    """
    if name is None or (name == AUTO and (device not in ShmBackend.device_types or ShmBackend.missing())):
        return None
    chosen = ShmBackend.name if name == AUTO else name
    if chosen == ShmBackend.name and len(hosts := _hosts(world_size)) > 1:
        if name == AUTO:
            return None
        raise CommError(f"{name} connects processes of one host, and the workers are on {len(hosts)}; use auto, group or gloo.")
    folders = [tempfile.mkdtemp(prefix="sagellm-") if rank == 0 else None]
    torch.distributed.broadcast_object_list(folders)
    backend, fault = None, None
    try:
        usual = {"spin_us": STEP_SPIN_US} if chosen == ShmBackend.name else {}
        backend = make_backend(
            CommConfig(
                backend=chosen, rank=rank, world_size=world_size, rendezvous=(Path(folders[0]) / "meet").as_uri(),
                options=usual | (options or {}),
            )
        )  # fmt: skip
        backend.barrier()
    except CommError as error:
        fault = error
    finally:
        if rank == 0:
            shutil.rmtree(folders[0], ignore_errors=True)
    if fault is not None and name != AUTO:
        raise fault
    if name == AUTO:
        faults: list[str] = [""] * world_size
        torch.distributed.all_gather_object(faults, str(fault or ""))
        if any(faults):
            logger.warning("sums of workers stay with LMDeploy's process group: %s", next(filter(None, faults)))
            if backend is not None:
                backend.close()
            return None
    return backend


def _hosts(world_size: int) -> set[str]:
    """Return the hosts of all workers, by what the kernel draws when it starts."""
    found: list[str] = [""] * world_size
    torch.distributed.all_gather_object(found, BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname())
    return set(found)


class CommChoice:
    """The decisions of one rank. All ranks ask for the same ones in the same order.

    Args:
        is_auto: measure, and take the quicker one.
        cpu_group: process group on the CPU through which rank 0 tells its decisions; None: the default one.
    """

    def __init__(
        self, host: PluginHost, rank: int, world_size: int, backend: CommBackendProtocol | None, is_auto: bool = False,
        cpu_group: Any = None,
    ) -> None:  # fmt: skip
        self._host, self._rank, self._world_size, self._cpu_group = host, rank, world_size, cpu_group
        self.backend = backend
        self._known: dict[tuple[Any, ...], CommDecision] = {}
        self.measured: dict[str, dict[int, float]] = {}  # seconds of a sum, by backend and bytes
        self._quickest = ""
        if is_auto and backend is not None:
            self._measure()

    @property
    def has_choice(self) -> bool:
        """True if a collective may go another way than by the process group."""
        return self.backend is not None or self._host.listens("comm_decide")

    def backends(self, name: str) -> tuple[str, ...]:
        """Return what can do a collective of torch.distributed, the process group first."""
        has_other = self.backend is not None and name in ARGUMENTS
        return (GROUP, self.backend.name) if has_other else (GROUP,)

    def of(self, name: str, num_bytes: int, dtype: str, layer: int | None = None, phase: str = "") -> CommDecision:
        """Return the decision about a collective of all ranks. All of them come here when they have one of a new sort."""
        size = 1 << max(0, num_bytes - 1).bit_length()
        key = (name, size, dtype, layer, phase)
        found = self._known.get(key)
        if found is None:
            request = CommRequest(name, size, dtype, self._world_size, layer, phase, self.backends(name))
            found = self._known[key] = self._ask(request) or self._usual(request)
        return found

    def of_layers(self, num_bytes: int, num_layers: int, phase: str) -> list[CommDecision]:
        """Return the decisions about the sums of the layers of a native step; the last one is that of the logits, too."""
        if not self._host.listens("comm_decide"):
            return [self.of("all_reduce", num_bytes, "float32", None, phase)] * num_layers
        return [self.of("all_reduce", num_bytes, "float32", layer, phase) for layer in range(num_layers)]

    def _usual(self, request: CommRequest) -> CommDecision:
        if len(request.backends) == 1:
            return CommDecision(GROUP)
        return CommDecision(self._quickest or request.backends[-1])

    def _ask(self, request: CommRequest) -> CommDecision | None:
        if not self._host.listens("comm_decide"):
            return None
        answers: list[CommDecision | None] = [self._answer(request) if self._rank == 0 else None]
        torch.distributed.broadcast_object_list(answers, group=self._cpu_group)
        return answers[0]

    def _answer(self, request: CommRequest) -> CommDecision | None:
        for name, plugin in self._host.listeners("comm_decide"):
            answer = self._host.call_one(name, "comm_decide", plugin.comm_decide, request)
            if answer is None:
                continue
            try:
                decision = CommDecision(*answer)
                is_valid = decision.backend in request.backends and decision.pieces in range(1, MAX_PIECES + 1)
            except TypeError:
                is_valid = False
            if is_valid:
                return decision
            wanted = f"give a CommDecision of {', '.join(request.backends)}, in 1 to {MAX_PIECES} pieces."
            self._host.guards[name].switch_off("comm_decide", "nonsense", f"comm_decide answered {answer!r}; {wanted}")
        return None

    def _measure(self) -> None:
        """Time sums of a few sizes by each backend. Rank 0's times hold for all."""
        ways: dict[str, Callable[[torch.Tensor], object]] = {
            GROUP: torch.distributed.all_reduce, self.backend.name: self.backend.all_reduce,
        }  # fmt: skip
        found: list[Any] = [{name: {size: _seconds(way, size) for size in MEASURED_BYTES} for name, way in ways.items()}]
        torch.distributed.broadcast_object_list(found, group=self._cpu_group)
        self.measured = found[0]
        # In the mean of the sizes: a single one may be wrong where others are at work.
        self._quickest = min(self.measured, key=lambda name: math.prod(self.measured[name].values()))


def _seconds(add_up: Callable[[torch.Tensor], object], num_bytes: int) -> float:
    tensor, times = torch.zeros(num_bytes // 4), []
    for _ in range(MEASURED_TIMES):
        start = time.perf_counter()
        add_up(tensor)
        times.append(time.perf_counter() - start)
    return min(times)  # others may be at work while an engine starts
