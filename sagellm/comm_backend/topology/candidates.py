"""Proposes who may do the collectives of a group of workers, by where they run."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from sagellm.comm_backend.topology.base import PathKind, TopologyInfo
from sagellm.comm_backend.topology.links import Links
from sagellm.core.collectives import GROUP

__all__ = ["Candidates", "Seat", "propose"]

NEAREST_FIRST = tuple(PathKind)


class Seat(NamedTuple):
    """Where a worker runs.

    Attributes:
        host: the same text for workers of one host.
        cores: cores that it may run on.
        gpu: number of its GPU; below 0 on the CPU device.
    """

    host: str
    cores: tuple[int, ...] = ()
    gpu: int = -1


class Candidates(NamedTuple):
    """Backends that may do the collectives of these workers, the engine's process group first, and why these."""

    backends: tuple[str, ...]
    reason: str


def propose(info: TopologyInfo, seats: Sequence[Seat]) -> Candidates:
    """Propose backends for workers. A measurement decides among them.

    Args:
        info: of the host of the first worker.
        seats: of each worker.
    """
    hosts = {seat.host for seat in seats}
    if len(hosts) > 1:
        return Candidates((GROUP,), f"workers run on {len(hosts)} hosts, and shared memory ends with one")
    if any(seat.gpu >= 0 for seat in seats):
        return Candidates((GROUP,), f"{_gpu_path(info, seats)}; the process group is NCCL's, which finds its way over it")
    return Candidates((GROUP, "shm"), f"workers share the memory of one host, on {_nodes(info, seats)}")


def _nodes(info: TopologyInfo, seats: Sequence[Seat]) -> str:
    cores = {core for seat in seats for core in seat.cores}
    nodes = [node for node in info.numa_nodes if cores.intersection(node.cpus)]
    if len(nodes) < 2:
        return nodes[0].name if nodes else "an unknown NUMA node"
    farthest = max(one.distances.get(other.index, 0) for one in nodes for other in nodes)
    return f"{', '.join(node.name for node in nodes)}, at most {farthest / 10:g} times as far as their own"


def _gpu_path(info: TopologyInfo, seats: Sequence[Seat]) -> str:
    """Say how far apart the GPUs are that are farthest from each other."""
    labels = {gpu.label for gpu in info.gpus}
    own = list(dict.fromkeys(f"gpu{seat.gpu}" for seat in seats))
    if unknown := [label for label in own if label not in labels]:
        return f"the links of {', '.join(unknown)} are unknown"
    links = [Links(info).between(a, b) for a, b in combinations(own, 2)]
    if not links:
        return f"all workers are on {own[0]}"
    worst = max(links, key=lambda link: NEAREST_FIRST.index(link.path))
    return f"{worst.a} and {worst.b} are joined by {worst.text}, and no pair of workers is farther apart"
