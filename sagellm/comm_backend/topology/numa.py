"""NUMA nodes: CPUs, memory, distances, socket and last-level cache. Source: Linux, ABI/stable/sysfs-devices-node."""

import re

from sagellm.comm_backend.topology.base import NumaNode
from sagellm.comm_backend.topology.sysfs import Sysfs

__all__ = ["detect_numa"]

NODES, CPUS = "devices/system/node", "devices/system/cpu"
SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MIN_DISTANCE, MAX_DISTANCE = 10, 255  # ACPI: 10 is local, 255 unreachable


def detect_numa(sysfs: Sysfs) -> tuple[NumaNode, ...]:
    """A kernel without NUMA shows no nodes: then all CPUs are one."""
    indexes = sorted(int(name[4:]) for name in sysfs.names(NODES) if re.fullmatch(r"node\d{1,5}", name))
    if indexes:
        return tuple(_node(sysfs, index, indexes) for index in indexes)
    cpus = sysfs.cpu_list(CPUS, "online")
    sysfs.note("no NUMA nodes in sysfs; the machine is taken for one node" if cpus else "no NUMA nodes and no CPUs in sysfs")
    return (_with_cpu(sysfs, NumaNode(index=0, cpus=cpus, distances={0: MIN_DISTANCE})),) if cpus else ()


def _node(sysfs: Sysfs, index: int, indexes: list[int]) -> NumaNode:
    folder = f"{NODES}/node{index}"
    total = sysfs.matched(r"MemTotal:\s*(\d{1,15}) kB", folder, "meminfo")
    node = NumaNode(
        index=index,
        cpus=sysfs.cpu_list(folder, "cpulist"),
        memory_bytes=1024 * int(total[1]) if total else None,
        distances=_distances(sysfs, folder, index, indexes),
    )
    return _with_cpu(sysfs, node)


def _distances(sysfs: Sysfs, folder: str, index: int, indexes: list[int]) -> dict[int, int]:
    text = sysfs.text(folder, "distance")
    if text is None:
        return {index: MIN_DISTANCE}
    numbers = [int(part) if part.isdecimal() else -1 for part in text.split()]
    # One number a node that is online, in ascending order; nodes may be missing from the count.
    if len(numbers) != len(indexes) or not all(MIN_DISTANCE <= number <= MAX_DISTANCE for number in numbers):
        sysfs.note(f"{folder}/distance holds {text[:40]!r}; {len(indexes)} numbers from 10 to 255 were expected")
        return {index: MIN_DISTANCE}
    return dict(zip(indexes, numbers, strict=True))


def _with_cpu(sysfs: Sysfs, node: NumaNode) -> NumaNode:
    if not node.cpus:
        return node
    cpu = f"{CPUS}/cpu{node.cpus[0]}"
    size = sysfs.matched(r"^(\d{1,12})([KMG])$", cpu, "cache/index3/size")
    l3_bytes = int(size[1]) * SIZES[size[2]] if size else None
    return node.model_copy(update={"socket": sysfs.number(cpu, "topology/physical_package_id"), "l3_bytes": l3_bytes})
