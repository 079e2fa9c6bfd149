"""A machine as a tree of text: NUMA nodes, below them host bridges, switches and devices."""

from collections.abc import Iterator
from typing import Any

from sagellm.comm_backend.topology.base import Gpu, Nic, Nvme, PciDevice, TopologyInfo
from sagellm.comm_backend.topology.pci import VENDORS

__all__ = ["describe", "rate_text", "size_text", "text_tree"]

Tree = dict[str, Any]  # an element of PCI paths -> what is below it


def text_tree(info: TopologyInfo) -> str:
    """One line a device; bridges appear where they branch."""
    lines = [info.host or "machine"]
    unplaced = any(node is None for node in _nodes_of(info).values())
    places = [*[(node.index, _node_text(info, node.index)) for node in info.numa_nodes]]
    if unplaced:
        places.append((None, "NUMA node not known"))
    for number, (index, text) in enumerate(places):
        last = number == len(places) - 1
        lines.append(f"{'└─' if last else '├─'} {text}")
        lines += _branches(_tree(info, index), info, "   " if last else "│  ")
    others = [nic.name for nic in info.nics if not nic.address]
    return "\n".join([*lines, *([f"without a PCI device: {', '.join(others)}"] if others else [])])


def describe(info: TopologyInfo) -> list[dict[str, str]]:
    """A row a device: what it is, its NUMA node, and what is known of its speed."""
    pci = {device.address: device for device in info.pci}
    rows = [
        {
            "name": node.name,
            "what": f"{len(node.cpus)} CPUs, {size_text(node.memory_bytes)}",
            "numa": str(node.index),
            "address": "",
            "speed": "",
        }
        for node in info.numa_nodes
    ]
    owners: list[Gpu | Nic | Nvme] = [*info.gpus, *info.nics, *info.nvmes]
    for owner in owners:
        device = pci.get(owner.address or "")
        rows.append(
            {
                "name": owner.label if isinstance(owner, Gpu) else owner.name,
                "what": _what(owner),
                "numa": "" if owner.numa_node is None else str(owner.numa_node),
                "address": owner.address or "",
                "speed": ", ".join(filter(None, (_nic_speed(owner), _pcie_speed(device)))),
            }
        )
    return rows


def size_text(num_bytes: int | None) -> str:
    return "memory not known" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"


def rate_text(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _what(owner: Gpu | Nic | Nvme) -> str:
    if isinstance(owner, Gpu):
        return f"{owner.name}{f', {size_text(owner.memory_bytes)}' if owner.memory_bytes else ''}"
    if isinstance(owner, Nvme):
        return "NVMe"
    state = {True: "up", False: "down", None: ""}[owner.is_up]
    return ", ".join(filter(None, (owner.kind, owner.hca if owner.hca != owner.name else "", state)))


def _nic_speed(owner: Gpu | Nic | Nvme) -> str:
    if isinstance(owner, Gpu) and owner.nvlinks:
        return f"{sum(links.count for links in owner.nvlinks)} NVLinks"
    return f"{owner.bits_per_s / 1e9:g} Gbit/s" if isinstance(owner, Nic) and owner.bits_per_s else ""


def _pcie_speed(device: PciDevice | None) -> str:
    return f"PCIe {device.link_gts:g} GT/s x{device.link_width}" if device and device.link_gts and device.link_width else ""


def _node_text(info: TopologyInfo, index: int) -> str:
    node = next(node for node in info.numa_nodes if node.index == index)
    socket = "" if node.socket is None else f", socket {node.socket}"
    far = ", ".join(f"{other}: {distance}" for other, distance in sorted(node.distances.items()) if other != index)
    distances = f"  (distance to {far})" if far else ""
    return f"{node.name}  {len(node.cpus)} CPUs, {size_text(node.memory_bytes)}{socket}{distances}"


def _nodes_of(info: TopologyInfo) -> dict[str, int | None]:
    """The NUMA node of each PCI device that is no bridge; with one node there is no question."""
    known = {node.index for node in info.numa_nodes}
    only = next(iter(known)) if len(known) == 1 else None
    found = {device.address: device.numa_node for device in info.pci if device.kind != "bridge"}
    return {address: node if node in known else only for address, node in found.items()}


def _tree(info: TopologyInfo, index: int | None) -> Tree:
    nodes = _nodes_of(info)
    tree: Tree = {}
    for device in info.pci:
        if device.kind != "bridge" and nodes[device.address] == index:
            below = tree
            for part in device.path:
                below = below.setdefault(part, {})
    return tree


def _branches(tree: Tree, info: TopologyInfo, indent: str) -> Iterator[str]:
    items = [_collapsed(name, below) for name, below in tree.items()]
    for number, (name, below) in enumerate(items):
        last = number == len(items) - 1
        yield f"{indent}{'└─' if last else '├─'} {_label(name, info)}"
        yield from _branches(below, info, indent + ("   " if last else "│  "))


def _collapsed(name: str, below: Tree) -> tuple[str, Tree]:
    """Return the last element of a chain of bridges without branches; the host bridge stays."""
    while len(below) == 1 and not name.startswith("pci"):
        ((name, below),) = below.items()
    return name, below


def _label(name: str, info: TopologyInfo) -> str:
    device = next((device for device in info.pci if device.address == name), None)
    if device is None or device.kind == "bridge":
        return f"{name}  {'host bridge' if device is None else 'bridge'}"
    rows = [row for row in describe(info) if row["address"] == name]
    if not rows:
        what = f"virtual function of {device.physical_function}" if device.physical_function else device.kind
        return f"{name}  {VENDORS.get(device.vendor, device.vendor)} {device.device}, {what}"
    return f"{name}  " + "; ".join(", ".join(filter(None, (row["name"], row["what"], row["speed"]))) for row in rows)
