"""Default figures of links, for what the machine does not say itself. Measure where it matters: `TopologyManager.measure`.

Bandwidths are those of one direction, of one transfer, as collectives reach them, not the peaks of data sheets.

Source: NCCL, src/graph/topo.h (`LOC_BW`, `SM60_NVLINK_BW` to `SM100_NVLINK_BW`, `SKL_QPI_BW`), src/graph/topo.cc (PCIe by speed
and width: 12 GB/s for 8 GT/s x16), src/graph/tuning.cc (`hwLat`, ring, simple protocol: NVLink, PCIe, network); ACPI, SLIT.
Those marked "own" are assumptions of this project.
"""

from sagellm.comm_backend.topology.base import PathKind

__all__ = [
    "LATENCY_S",
    "LOCAL_BYTES_PER_S",
    "MEMORY_BYTES_PER_S",
    "MEMORY_LATENCY_S",
    "NET_BYTES_PER_S",
    "SOCKETS_BYTES_PER_S",
    "SWITCH_LATENCY_S",
    "nvlink_bytes_per_s",
    "pcie_bytes_per_s",
]

LOCAL_BYTES_PER_S = 5000e9  # within a device: NCCL's LOC_BW, a stand-in for "no limit"
MEMORY_BYTES_PER_S = 10e9  # own: a copy by one thread, memory of one NUMA node
MEMORY_LATENCY_S = 1e-6  # own: one thread tells another through memory of its own node; elsewhere times the SLIT distance / 10
SOCKETS_BYTES_PER_S = 10e9  # NCCL's SKL_QPI_BW
NET_BYTES_PER_S = 1.25e9  # own: 10 Gbit/s, where a NIC does not tell its speed
LATENCY_S = {PathKind.NVLINK: 3.4e-6, PathKind.PIX: 5.7e-6, PathKind.NET: 14e-6}
SWITCH_LATENCY_S = 0.15e-6  # own: each step from PIX to PXB, PHB, NODE and SYS, so that of equal widths the nearest costs least

NVLINK_BYTES_PER_S = {1: 18.0e9, 2: 20.0e9, 3: 20.0e9, 4: 20.6e9, 5: 40.1e9}  # of one link, by NVLink version


def nvlink_bytes_per_s(version: int | None, lanes: int) -> float:
    """An unknown version is taken for 2, a newer one for the newest that is known."""
    newest = max(NVLINK_BYTES_PER_S)
    return lanes * NVLINK_BYTES_PER_S[min(version or 2, newest)]


def pcie_bytes_per_s(gts: float, width: int) -> float:
    """Three quarters of the bits arrive as data; of the first two generations, which send 10 bits for 8, less."""
    coding = 0.8 if gts <= 5 else 1.0
    return gts * 1e9 / 8 * width * coding * 0.75
