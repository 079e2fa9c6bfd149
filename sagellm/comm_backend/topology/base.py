"""Facts about a machine: frozen models, to and from JSON.

Unknown values are None, never a guess; odd ones are a line of `TopologyInfo.notes`. Bandwidths are bytes a second.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from sagellm.core.config import Model
from sagellm.core.enums import StrEnum
from sagellm.core.errors import CommError

__all__ = [
    "NET",
    "SWITCH",
    "Gpu",
    "Link",
    "LinkKind",
    "Measurement",
    "Nic",
    "NumaNode",
    "NvLinks",
    "Nvme",
    "PathKind",
    "PciDevice",
    "TopologyInfo",
]

SWITCH = "switch"  # the other end of NVLinks that lead into an NVSwitch
NET = "net"  # the name of "another host" among the devices

Index = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0)]


class LinkKind(StrEnum):
    """Carrier of the bytes."""

    SELF = "SELF"
    NVLINK = "NVLINK"
    PCIE = "PCIE"
    NUMA = "NUMA"
    NET = "NET"


class PathKind(StrEnum):
    """How far apart two devices are, nearest first, in the words of `nvidia-smi topo --matrix`."""

    SELF = "X"
    NVLINK = "NV"  # a bonded set of NVLinks; shown with their number
    PIX = "PIX"  # at most one PCIe bridge
    PXB = "PXB"  # several PCIe bridges, but no host bridge
    PHB = "PHB"  # a PCIe host bridge, usually the CPU
    NODE = "NODE"  # host bridges of one NUMA node, or nodes of one socket
    SYS = "SYS"  # the interconnect of sockets
    NET = "NET"  # a network


class NumaNode(Model):
    """`distances`: node -> SLIT distance, 10 is local. A node may have no CPUs (memory alone) or no memory."""

    index: Index
    cpus: tuple[Index, ...] = ()
    memory_bytes: Count | None = None
    distances: dict[Index, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    socket: Index | None = None
    l3_bytes: Count | None = None

    @property
    def name(self) -> str:
        return f"numa{self.index}"


class PciDevice(Model):
    """A device of interest, or a bridge above one.

    Attributes:
        path: from the host bridge (`pci0000:00`) down to the device itself.
        link_gts, link_width: of the link above it: GT/s of the slower end at full speed, since links slow down while idle, and
            lanes in use.
        physical_function: the address of the device of which this is a virtual function (SR-IOV).
    """

    address: str
    kind: Literal["gpu", "accelerator", "nic", "infiniband", "nvme", "bridge"]
    vendor: str = ""
    device: str = ""
    numa_node: Index | None = None
    path: Annotated[tuple[str, ...], Field(min_length=2)]
    link_gts: Rate | None = None
    link_width: Annotated[int, Field(ge=1)] | None = None
    physical_function: str | None = None


class Nic(Model):
    """A network interface, an RDMA device (`hca`), or both. `address`: of the PCI device they are on, if there is one."""

    name: str
    kind: Literal["ethernet", "infiniband", "roce", "loopback", "virtual"]
    hca: str | None = None
    address: str | None = None
    numa_node: Index | None = None
    bits_per_s: Rate | None = None
    is_up: bool | None = None


class Nvme(Model):
    """An NVMe controller."""

    name: str
    address: str
    numa_node: Index | None = None


class NvLinks(Model):
    """Active NVLinks of a GPU that lead to the same place: `peer` is a PCI address, or `SWITCH`."""

    peer: str
    count: Annotated[int, Field(ge=1)]
    version: Annotated[int, Field(ge=1)] | None = None


class Gpu(Model):
    """A GPU or another accelerator. By NVML's order where NVML answers, else by PCI address."""

    index: Index
    name: str
    address: str
    vendor: str = ""
    numa_node: Index | None = None
    memory_bytes: Count | None = None
    uuid: str | None = None
    nvlinks: tuple[NvLinks, ...] = ()

    @property
    def label(self) -> str:
        return f"gpu{self.index}"


class Measurement(Model):
    """A copy from `a` to `b` that was timed here; `lo` with itself is TCP on loopback."""

    a: str
    b: str
    bytes_per_s: Rate
    latency_s: Seconds | None = None
    num_bytes: Count


class Link(Model):
    """The way between two devices. `lanes`: NVLinks. `source`: where the figures come from."""

    a: str
    b: str
    kind: LinkKind
    path: PathKind
    lanes: Count = 0
    bytes_per_s: Rate
    latency_s: Seconds
    source: str

    @property
    def text(self) -> str:
        """As `nvidia-smi topo` writes it."""
        return f"NV{self.lanes}" if self.path is PathKind.NVLINK else str(self.path)

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


class TopologyInfo(Model):
    """A machine. Devices of the cost matrix are its `device_names`."""

    host: str = ""
    numa_nodes: tuple[NumaNode, ...] = ()
    pci: tuple[PciDevice, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    nvmes: tuple[Nvme, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_names(self) -> "TopologyInfo":
        numa = [node.name for node in self.numa_nodes]
        names = [*numa, *(each.label for each in self.gpus), *(each.name for each in (*self.nics, *self.nvmes)), NET]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"two devices are named {twice[0]!r}; each has a name of its own.")
        return self

    @property
    def device_names(self) -> tuple[str, ...]:
        """NUMA nodes, GPUs, NICs that are devices, NVMe, and `NET` where a NIC leads there."""
        nics = self.own_nics
        return (
            *(node.name for node in self.numa_nodes),
            *(gpu.label for gpu in self.gpus),
            *(nic.name for nic in nics),
            *(nvme.name for nvme in self.nvmes),
            *([NET] if any(nic.is_up is not False for nic in nics) else []),
        )

    @property
    def own_nics(self) -> tuple[Nic, ...]:
        """Those on a PCI device; a virtual function only where its physical function shows no NIC, as in a container."""
        addresses = {nic.address for nic in self.nics if nic.address}
        functions = {device.address: device.physical_function for device in self.pci}
        return tuple(nic for nic in self.nics if nic.address and functions.get(nic.address) not in addresses)

    def to_json(self) -> str:
        return self.model_dump_json(indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "TopologyInfo":
        """Read what `to_json` or `sagellm topology --json` writes. Raises CommError: anything else."""
        try:
            document = json.loads(text)
            whole = document.get("topology", document) if isinstance(document, dict) else document
            return cls.model_validate_json(json.dumps(whole))  # as JSON: its arrays are tuples, its keys numbers
        except (ValueError, RecursionError) as error:
            if not isinstance(error, ValidationError):
                raise CommError(f"no topology: {error}; write one with `sagellm topology --json`.") from None
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "document"
            raise CommError(f"no topology: {place}: {first['msg']}; write one with `sagellm topology --json`.") from None

    @classmethod
    def read(cls, path: Path) -> "TopologyInfo":
        """Raises CommError: the file cannot be read, or is no topology."""
        try:
            return cls.from_json(path.read_bytes())
        except OSError as error:
            raise CommError(f"cannot read {path}: {error.strerror}.") from None
