"""The way between any two devices: its kind, and what a transfer over it costs.

Source: nvidia-smi, `topo --matrix`, legend; of the ways between two GPUs NVLink goes before PCIe.
"""

from collections.abc import Callable

from sagellm.comm_backend.topology.base import (
    NET,
    Gpu,
    Link,
    LinkKind,
    Measurement,
    Nic,
    NumaNode,
    Nvme,
    PathKind,
    PciDevice,
    TopologyInfo,
)
from sagellm.comm_backend.topology.costs import (
    LATENCY_S,
    LOCAL_BYTES_PER_S,
    MEMORY_BYTES_PER_S,
    MEMORY_LATENCY_S,
    NET_BYTES_PER_S,
    SOCKETS_BYTES_PER_S,
    SWITCH_LATENCY_S,
    nvlink_bytes_per_s,
    pcie_bytes_per_s,
)

__all__ = ["Links", "pci_path"]

PciOwner = Gpu | Nic | Nvme
STEPS = (PathKind.PIX, PathKind.PXB, PathKind.PHB, PathKind.NODE, PathKind.SYS)
LOCAL_DISTANCE = 10


class Links:
    """Links among the devices of a machine, by name; both directions are alike."""

    def __init__(self, info: TopologyInfo) -> None:
        self._info = info
        self._pci = {device.address: device for device in info.pci}
        self._nodes = {node.name: node for node in info.numa_nodes}
        nics = {nic.name: nic for nic in info.own_nics}
        self._nics = nics
        self._owners: dict[str, PciOwner] = {gpu.label: gpu for gpu in info.gpus}
        self._owners.update(nics)
        self._owners.update({nvme.name: nvme for nvme in info.nvmes})
        self._names = {*self._nodes, *self._owners, *info.device_names}
        self._gpu_addresses = {gpu.address for gpu in info.gpus}
        self._measured = {(each.a, each.b): each for each in info.measurements}

    def all(self) -> tuple[Link, ...]:
        """Return links of every pair of devices, and of each with itself, in the order of `device_names`."""
        names = self._info.device_names
        return tuple(self.between(a, b) for place, a in enumerate(names) for b in names[place:])

    def between(self, a: str, b: str) -> Link:
        """Raises KeyError: no such device."""
        for name in (a, b):
            if name not in self._names:
                raise KeyError(name)
        if a == b and a not in self._nodes:
            return Link(
                a=a, b=b, kind=LinkKind.SELF, path=PathKind.SELF, bytes_per_s=LOCAL_BYTES_PER_S, latency_s=0.0, source="nothing"
            )
        if NET in (a, b):
            return self._to_net(a, b)
        if a in self._nodes and b in self._nodes:
            return self._memory(self._nodes[a], self._nodes[b])
        first, second = self._owners.get(a), self._owners.get(b)
        if isinstance(first, Gpu) and isinstance(second, Gpu) and (nvlink := self._nvlink(first, second)):
            return nvlink
        return self._pcie(a, b)

    # ---- memory

    def _memory(self, a: NumaNode, b: NumaNode) -> Link:
        kind, path = (LinkKind.SELF, PathKind.SELF) if a.index == b.index else (LinkKind.NUMA, self._between_nodes(a, b))
        distance = max(a.distances.get(b.index, LOCAL_DISTANCE), b.distances.get(a.index, LOCAL_DISTANCE))
        link = Link(
            a=a.name,
            b=b.name,
            kind=kind,
            path=path,
            bytes_per_s=SOCKETS_BYTES_PER_S if path is PathKind.SYS else MEMORY_BYTES_PER_S,
            latency_s=MEMORY_LATENCY_S * distance / LOCAL_DISTANCE,
            source="default",
        )
        return self._with_measured(link)

    def _with_measured(self, link: Link) -> Link:
        """The slower of both directions."""
        found = [self._measured[pair] for pair in {(link.a, link.b), (link.b, link.a)} if pair in self._measured]
        if not found:
            return link
        slowest: Measurement = min(found, key=lambda each: each.bytes_per_s)
        latency_s = link.latency_s if slowest.latency_s is None else slowest.latency_s
        return link.model_copy(update={"bytes_per_s": slowest.bytes_per_s, "latency_s": latency_s, "source": "measured"})

    def _between_nodes(self, a: NumaNode | None, b: NumaNode | None) -> PathKind:
        """Nodes of one socket are near; where the sockets are not known, two nodes are two sockets."""
        if a is None or b is None:
            return PathKind.NODE if len(self._nodes) == 1 else PathKind.SYS
        is_near = a.index == b.index or (a.socket is not None and a.socket == b.socket)
        return PathKind.NODE if is_near else PathKind.SYS

    # ---- NVLink

    def _nvlink(self, a: Gpu, b: Gpu) -> Link | None:
        direct = [link for link in a.nvlinks if link.peer == b.address]
        lanes, version = sum(link.count for link in direct), next((link.version for link in direct), None)
        if not lanes:  # by way of a switch all are neighbours, with as many links as the one that has fewer
            ends = [[link for link in gpu.nvlinks if link.peer not in self._gpu_addresses] for gpu in (a, b)]
            lanes = min(sum(link.count for link in links) for links in ends)
            version = min((link.version for links in ends for link in links if link.version), default=None)
        if not lanes:
            return None
        return Link(
            a=a.label,
            b=b.label,
            kind=LinkKind.NVLINK,
            path=PathKind.NVLINK,
            lanes=lanes,
            bytes_per_s=nvlink_bytes_per_s(version, lanes),
            latency_s=LATENCY_S[PathKind.NVLINK],
            source=f"{lanes} NVLinks, version {version or 'unknown'}",
        )

    # ---- PCIe

    def _pcie(self, a: str, b: str) -> Link:
        """Between two PCI devices, or one and the memory of a NUMA node, which is behind the host bridge."""
        ends = [self._pci.get(owner.address or "") for name in (a, b) if (owner := self._owners.get(name))]
        path = self._pcie_path(a, b)
        used = [hop for end in ends if end for hop in self._hops(end, ends, path)]
        rate, source = _narrowest(used)
        if path is PathKind.SYS and rate > SOCKETS_BYTES_PER_S:
            rate, source = SOCKETS_BYTES_PER_S, "default of sockets"
        steps = STEPS.index(path)
        latency_s = LATENCY_S[PathKind.PIX] + steps * SWITCH_LATENCY_S
        return Link(a=a, b=b, kind=LinkKind.PCIE, path=path, bytes_per_s=rate, latency_s=latency_s, source=source)

    def _pcie_path(self, a: str, b: str) -> PathKind:
        nodes = [self._nodes.get(name) or self._node_of(self._owners[name]) for name in (a, b)]
        if a in self._nodes or b in self._nodes:
            is_same = nodes[0] == nodes[1] or len(self._nodes) == 1
            return PathKind.PHB if is_same else self._between_nodes(*nodes)
        first, second = (self._pci.get(self._owners[name].address or "") for name in (a, b))
        if first is None or second is None:
            return self._between_nodes(*nodes)
        return pci_path(first, second) or self._between_nodes(*nodes)

    def _hops(self, device: PciDevice, ends: list[PciDevice | None], path: PathKind) -> list[PciDevice]:
        """Links that a transfer crosses: all up to the host bridge, or those below the bridge that both ends share."""
        shared: set[str] = set()
        if path in (PathKind.PIX, PathKind.PXB):
            shared = set.intersection(*(set(end.path) for end in ends if end))
        if device.path[-1] in shared:  # functions of one card
            return [device]
        return [self._pci[address] for address in device.path[1:] if address in self._pci and address not in shared]

    def _node_of(self, owner: PciOwner) -> NumaNode | None:
        return self._nodes.get(f"numa{owner.numa_node}")

    # ---- network

    def _to_net(self, a: str, b: str) -> Link:
        """Over the NIC by which it costs least to send a megabyte."""
        name = b if a == NET else a
        ways = []
        for nic in self._nics.values():
            if nic.is_up is False or (name in self._nics and nic.name != name):
                continue
            rate = nic.bits_per_s / 8 if nic.bits_per_s else NET_BYTES_PER_S
            source = "speed of the NIC" if nic.bits_per_s else "default"
            latency_s = LATENCY_S[PathKind.NET]
            if nic.name != name:
                first = self._pcie(name, nic.name)
                rate, latency_s = min(rate, first.bytes_per_s), latency_s + first.latency_s
            ways.append((rate, latency_s, f"{nic.name}, {source}"))
        if not ways:  # a NIC that is down: as another device would reach the net
            others = [nic.name for nic in self._nics.values() if nic.is_up is not False]
            nearest = self._to_net(others[0], NET)
            ways.append((nearest.bytes_per_s, nearest.latency_s + LATENCY_S[PathKind.PIX], f"{name} is down; {nearest.source}"))
        cost: Callable[[tuple[float, float, str]], float] = lambda way: way[1] + 1e6 / way[0]  # noqa: E731
        rate, latency_s, source = min(ways, key=cost)
        return Link(a=a, b=b, kind=LinkKind.NET, path=PathKind.NET, bytes_per_s=rate, latency_s=latency_s, source=source)


def pci_path(a: PciDevice, b: PciDevice) -> PathKind | None:
    """By the bridges between two devices; None where only NUMA nodes can tell, since they share no host bridge."""
    if a.path[0] != b.path[0]:
        return None
    if a.address.partition(".")[0] == b.address.partition(".")[0]:
        return PathKind.PIX  # functions of one card
    shared = 0
    while shared < min(len(a.path), len(b.path)) and a.path[shared] == b.path[shared]:
        shared += 1
    if shared <= 1:
        return PathKind.PHB
    # A switch is a port up, which both share, and a port down for each of them.
    bridges = max(len(a.path), len(b.path)) - shared - 1
    return PathKind.PIX if bridges <= 1 else PathKind.PXB


def _narrowest(hops: list[PciDevice]) -> tuple[float, str]:
    rates = [
        (pcie_bytes_per_s(hop.link_gts, hop.link_width), f"{hop.link_gts:g} GT/s x{hop.link_width} of {hop.address}")
        for hop in hops
        if hop.link_gts and hop.link_width
    ]
    return min(rates, default=(pcie_bytes_per_s(8.0, 16), "default of PCIe"))
