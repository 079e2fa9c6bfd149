"""Which backend does a collective of the workers, and how: decided once for each sort of collective.

Rules of the scheduler come first: they arrive with a step, the same on all ranks. Then a plug-in's `comm_decide` is asked on
rank 0, and its answer holds on all ranks. Otherwise `comm_backend` does what it can. With "auto" that is the quicker one of the
process group and shared memory, as measured at the start.
"""

import logging
import math
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sagellm.comm_backend.base import CommBackendProtocol
from sagellm.comm_backend.config import CommConfig
from sagellm.comm_backend.overlap_window import OverlapWindow
from sagellm.comm_backend.registry import make_backend
from sagellm.comm_backend.shm import ShmBackend
from sagellm.comm_backend.topology import Candidates, Seat, TopologyInfo, TopologyManager
from sagellm.comm_backend.topology.placement import available_cores
from sagellm.core.collectives import GROUP, CommDecision, CommRequest, CommRule, sort_bytes, sort_of
from sagellm.core.errors import CommError
from sagellm.core.host import PluginHost

__all__ = ["AUTO", "CommChoice", "Joined", "join"]

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


class Joined(NamedTuple):
    """A worker's part of a backend's group.

    Attributes:
        backend: None if collectives stay with the process group.
        candidates: the backends that there are, and why these.
        topology_s: seconds to find out how the machine is built; None if that was not asked.
    """

    backend: CommBackendProtocol | None
    candidates: Candidates
    topology_s: float | None = None


def join(name: str | None, device: str, rank: int, world_size: int, options: dict[str, Any] | None = None) -> Joined:
    """Make this worker's part of a backend's group. All workers come here at the same time.

    Args:
        name: a backend, or "auto", which takes what the topology proposes if it works on all ranks; None: no other than the
            process group.

    Raises:
        CommError: a backend that was named does not work.
    """
    if name is None:
        return Joined(None, Candidates((GROUP,), "comm_backend is group"))
    seats, topology_s = _seats(device, world_size), None
    candidates = Candidates((GROUP, name), f"comm_backend is {name}")
    if name == AUTO:
        candidates, topology_s = _proposed(rank, seats)
    chosen = candidates.backends[-1]
    if chosen == GROUP:
        return Joined(None, candidates, topology_s)
    if chosen == ShmBackend.name and len(hosts := {seat.host for seat in seats}) > 1:
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
        if why := next(filter(None, faults), ""):
            logger.warning("sums of workers stay with LMDeploy's process group: %s", why)
            if backend is not None:
                backend.close()
            return Joined(None, Candidates((GROUP,), f"{candidates.reason}; {chosen} does not work here: {why}"), topology_s)
    return Joined(backend, candidates._replace(backends=(GROUP, backend.name)), topology_s)


def _seats(device: str, world_size: int) -> list[Seat]:
    """Return where all workers run. A host is named by what its kernel draws when it starts."""
    host = BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()
    found: list[Any] = [None] * world_size
    gpu = torch.cuda.current_device() if device == "cuda" else -1
    torch.distributed.all_gather_object(found, Seat(host, tuple(available_cores()), gpu))
    return found


def _proposed(rank: int, seats: list[Seat]) -> tuple[Candidates, float]:
    """Return what the topology of rank 0's host proposes, and the seconds to detect it."""
    found: list[Any] = [None]
    if rank == 0:
        start, manager = time.perf_counter(), TopologyManager()
        try:
            manager.detect()
        except CommError:  # no sysfs: nothing is known of nodes
            manager = TopologyManager(info=TopologyInfo())
        topology_s = time.perf_counter() - start
        found = [(manager.candidates(seats), topology_s)]
    torch.distributed.broadcast_object_list(found)
    return found[0]


class CommChoice:
    """The decisions of one rank. All ranks ask for the same ones in the same order.

    Args:
        joined: what may do them beside the process group; None: nothing.
        is_auto: measure, and take the quicker one.
        cpu_group: process group on the CPU through which rank 0 tells its decisions; None: the default one.
    """

    def __init__(
        self, host: PluginHost, rank: int, world_size: int, joined: Joined | None = None, is_auto: bool = False,
        cpu_group: Any = None,
    ) -> None:  # fmt: skip
        self._host, self._rank, self._world_size, self._cpu_group = host, rank, world_size, cpu_group
        self._joined = joined or Joined(None, Candidates((GROUP,), "no other backend was joined"))
        self.backend = self._joined.backend
        self._known: dict[tuple[Any, ...], CommDecision] = {}
        self._rules: dict[tuple[str, int], CommRule] = {}  # of the scheduler, before all other decisions
        # seconds, by function of torch.distributed, backend, and bytes of a rank
        self.measured: dict[str, dict[str, dict[int, float]]] = {}
        self._quickest: dict[str, str] = {}
        self.window = OverlapWindow(self._agree)
        if is_auto and self.backend is not None:
            self._measure()

    @property
    def has_choice(self) -> bool:
        """True if a collective may go another way than by the process group."""
        return self.backend is not None or self._host.listens("comm_decide")

    def report(self) -> dict[str, Any]:
        """Return who does collectives if no rule and no plug-in says otherwise, and why; fit for JSON."""
        chosen = self._quickest or dict.fromkeys(ARGUMENTS, self._joined.candidates.backends[-1])
        return {
            "chosen": chosen, "candidates": self._joined.candidates.backends, "reason": self._joined.candidates.reason,
            "topology_s": self._joined.topology_s, "measured": self.measured, "overlap": self.window.report(),
        }  # fmt: skip

    def backends(self, name: str, device: str = "cpu") -> tuple[str, ...]:
        """Return what can do a collective of torch.distributed on tensors of a device, the process group first."""
        has_other = self.backend is not None and name in ARGUMENTS and device in self.backend.device_types
        return (GROUP, self.backend.name) if has_other else (GROUP,)

    def of(
        self, name: str, num_bytes: int, dtype: str, layer: int | None = None, phase: str = "", device: str = "cpu"
    ) -> CommDecision:
        """Return the decision about a collective of all ranks. All of them come here when they have one of a new sort."""
        size = sort_bytes(num_bytes)
        if self._rules and (rule := self._rules.get((name, size))) is not None:
            backend = rule.backend if rule.backend in self.backends(name, device) else GROUP
            return CommDecision(backend, rule.pieces, rule.fused)
        key = (name, size, dtype, layer, phase, device)
        found = self._known.get(key)
        if found is None:
            known = self.backends(name, device)
            request = CommRequest(name, size, dtype, self._world_size, layer, phase, known, device)
            found = self._known[key] = self._ask(request) or self._usual(request)
        return found

    def follow(self, rules: Iterable[CommRule]) -> None:
        """Do collectives of these sorts so from now on, and all others as without any rule."""
        self._rules = {sort_of(rule): rule for rule in rules}

    def of_layers(self, num_bytes: int, num_layers: int, phase: str) -> list[CommDecision]:
        """Return the decisions about the sums of the layers of a native step."""
        if not self._host.listens("comm_decide"):
            return [self.of("all_reduce", num_bytes, "float32", None, phase)] * num_layers
        return [self.of("all_reduce", num_bytes, "float32", layer, phase) for layer in range(num_layers)]

    def _usual(self, request: CommRequest) -> CommDecision:
        if len(request.backends) == 1:
            return CommDecision(GROUP)
        return CommDecision(self._quickest.get(request.name, request.backends[-1]))

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
            except TypeError:
                decision = CommDecision("")
            fault = decision.fault(request.backends)
            if not fault:
                return decision
            self._host.guards[name].switch_off("comm_decide", "nonsense", f"comm_decide answered {answer!r}; {fault}.")
        return None

    def _agree(self, number: float) -> float:
        """Return rank 0's number on all ranks."""
        found = [number]
        torch.distributed.broadcast_object_list(found, group=self._cpu_group)
        return found[0]

    def _measure(self) -> None:
        """Time collectives of a few sizes by each backend. Rank 0's times hold for all."""
        found: list[Any] = [
            {name: {backend: {size: _seconds(way, size) for size in MEASURED_BYTES} for backend, way in ways.items()}
             for name, ways in self._ways().items()}
        ]  # fmt: skip
        torch.distributed.broadcast_object_list(found, group=self._cpu_group)
        self.measured = found[0]
        for name, times in self.measured.items():
            # In the mean of the sizes: a single one may be wrong where others are at work.
            self._quickest[name] = min(times, key=lambda backend, times=times: math.prod(times[backend].values()))
        self._quickest["broadcast"] = self._quickest["all_reduce"]  # it is not timed

    def _ways(self) -> dict[str, dict[str, Callable[[torch.Tensor], object]]]:
        """Return calls with a rank's tensor, by function and backend."""

        def gather_by_group(tensor: torch.Tensor) -> None:
            torch.distributed.all_gather([torch.empty_like(tensor) for _ in range(self._world_size)], tensor)

        def gather(tensor: torch.Tensor) -> None:
            self.backend.all_gather(tensor.new_empty(self._world_size, *tensor.shape), tensor)

        return {
            "all_reduce": {GROUP: torch.distributed.all_reduce, self.backend.name: self.backend.all_reduce},
            "all_gather": {GROUP: gather_by_group, self.backend.name: gather},
        }


def _seconds(collective: Callable[[torch.Tensor], object], num_bytes: int) -> float:
    tensor, times = torch.zeros(num_bytes // 4), []
    for _ in range(MEASURED_TIMES):
        start = time.perf_counter()
        collective(tensor)
        times.append(time.perf_counter() - start)
    return min(times)  # others may be at work while an engine starts
