"""Places engines and workers on NUMA nodes and cores."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sagellm.comm_backend.topology.base import TopologyInfo
from sagellm.core.errors import ConfigError

__all__ = ["Place", "available_cores", "place_engines", "place_workers", "usable_nodes"]


@dataclass(frozen=True, slots=True)
class Place:
    """NUMA nodes and cores of one process. Linux takes its memory from the node that it runs on."""

    nodes: tuple[int, ...]
    cores: tuple[int, ...]

    def __str__(self) -> str:
        nodes = ", ".join(map(str, self.nodes))
        return f"cores {', '.join(map(str, self.cores))}; NUMA node{'s' if len(self.nodes) > 1 else ''} {nodes}"


def available_cores() -> list[int]:
    """List the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def usable_nodes(info: TopologyInfo, cores: Sequence[int]) -> list[Place]:
    """List the NUMA nodes with at least one of `cores`; cores that no node claims are one more node, 0."""
    allowed = set(cores)
    found = [Place((node.index,), tuple(sorted(allowed & set(node.cpus)))) for node in info.numa_nodes]
    found = [place for place in found if place.cores]
    claimed = {core for place in found for core in place.cores}
    rest = tuple(sorted(allowed - claimed))
    return [*found, Place((0,), rest)] if rest else found


def place_workers(info: TopologyInfo, cores: Sequence[int], num: int) -> list[Place]:
    """Give each of `num` workers whole NUMA nodes, as evenly as possible; neighbours share a node.

    On a machine with one node every worker gets all cores.
    """
    nodes = usable_nodes(info, cores)
    if num < len(nodes):
        return [_joined(nodes[first:last]) for first, last in pairwise(_bounds(len(nodes), num))]
    return [nodes[number * len(nodes) // num] for number in range(num)]


def place_engines(info: TopologyInfo, cores: Sequence[int], num: int) -> list[Place]:
    """Give each of `num` engines cores of its own, on as few NUMA nodes as possible.

    The sizes of shares of one node differ by one at most; the first ones are the larger ones.

    Raises:
        ConfigError: there are fewer cores than engines.
    """
    if len(cores) < num:
        raise ConfigError(f"--pin: {num} engines for {len(cores)} cores; start fewer engines, or omit --pin.")
    nodes = usable_nodes(info, cores)
    if num < len(nodes):
        return place_workers(info, cores, num)
    counts = [1] * len(nodes)
    for _ in range(num - len(nodes)):  # the next engine goes where engines have the most cores each after that
        best = max(range(len(nodes)), key=lambda index: len(nodes[index].cores) / (counts[index] + 1))
        counts[best] += 1
    shares = []
    for node, count in zip(nodes, counts, strict=True):
        shares += [Place(node.nodes, node.cores[a:b]) for a, b in pairwise(_bounds(len(node.cores), count))]
    return shares


def _bounds(size: int, num: int) -> list[int]:
    share, rest = divmod(size, num)
    return [number * share + min(number, rest) for number in range(num + 1)]


def _joined(places: Sequence[Place]) -> Place:
    nodes = tuple(node for place in places for node in place.nodes)
    return Place(nodes, tuple(sorted(core for place in places for core in place.cores)))
