"""Finds the topology of the machine: from sysfs always, from NVML where it answers."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sagellm.comm_backend.topology.base import Gpu, Link, Nic, NumaNode, PciDevice, TopologyInfo
from sagellm.comm_backend.topology.candidates import Candidates, Seat, propose
from sagellm.comm_backend.topology.links import Links
from sagellm.comm_backend.topology.measure import measure_loopback, measure_memory
from sagellm.comm_backend.topology.nics import detect_nics, detect_nvmes
from sagellm.comm_backend.topology.numa import detect_numa
from sagellm.comm_backend.topology.nvlink import detect_gpus, load_nvml
from sagellm.comm_backend.topology.pci import detect_pci
from sagellm.comm_backend.topology.sysfs import Sysfs
from sagellm.core.errors import CommError

__all__ = ["TopologyManager"]

MAX_MEASURED_BYTES = 1 << 30


class TopologyManager:
    """Looks when it is asked to; `info` is what the last `detect` or `measure` found.

    Args:
        root: of the sysfs tree.
        nvml: an object with NVML's functions; by default `pynvml` where it is installed, and none for another tree than /sys.
        info: known already, as from `TopologyInfo.read`; then nothing is looked for until `detect` is called.
    """

    def __init__(self, root: Path | str = "/sys", nvml: Any | None = None, info: TopologyInfo | None = None) -> None:
        self._root = root
        self._nvml = nvml
        self._info = info

    @property
    def info(self) -> TopologyInfo:
        return self._info if self._info is not None else self.detect()

    def detect(self) -> TopologyInfo:
        """Raises CommError: there is no sysfs. All else that is missing or makes no sense is None or a note."""
        sysfs = Sysfs(self._root)
        pci = detect_pci(sysfs)
        self._info = TopologyInfo(
            host=platform.node() if self._is_own else "",
            numa_nodes=detect_numa(sysfs),
            pci=pci,
            gpus=detect_gpus(sysfs, pci, self._load_nvml()),
            nics=detect_nics(sysfs),
            nvmes=detect_nvmes(sysfs),
            notes=tuple(sysfs.notes),
        )
        return self._info

    def detect_nvlink(self) -> tuple[Gpu, ...]:
        """GPUs, with their NVLinks."""
        sysfs = Sysfs(self._root)
        return detect_gpus(sysfs, detect_pci(sysfs), self._load_nvml())

    def detect_numa(self) -> tuple[NumaNode, ...]:
        return detect_numa(Sysfs(self._root))

    def detect_pci(self) -> tuple[PciDevice, ...]:
        return detect_pci(Sysfs(self._root))

    def detect_nics(self) -> tuple[Nic, ...]:
        return detect_nics(Sysfs(self._root))

    def measure(self, num_bytes: int = 64 << 20) -> TopologyInfo:
        """Time copies within and between NUMA nodes, and loopback; from then on the cost matrix uses the copies.

        Takes some 12 copies of `num_bytes` for each pair of nodes, on one thread. Raises CommError: the topology is that of
        another machine; nonsense for `num_bytes`.
        """
        if not 4096 <= num_bytes <= MAX_MEASURED_BYTES:
            raise CommError(f"num_bytes is {num_bytes!r}; give 4096 to {MAX_MEASURED_BYTES}.")
        if not self._is_own or self.info.host not in ("", platform.node()):
            raise CommError("this topology is not that of this machine; measure where it was found.")
        found, notes = measure_memory(self.info.numa_nodes, num_bytes)
        update = {
            "measurements": (*found, measure_loopback(num_bytes)),
            "notes": tuple(dict.fromkeys((*self.info.notes, *notes))),
        }
        self._info = self.info.model_copy(update=update)
        return self._info

    def links(self) -> tuple[Link, ...]:
        """Return links of every pair of devices, and of each with itself."""
        return Links(self.info).all()

    def link(self, a: str, b: str) -> Link:
        """Raises CommError: no such device."""
        try:
            return Links(self.info).between(a, b)
        except KeyError as error:
            raise CommError(f"no device {error.args[0]!r}; there are {', '.join(self.info.device_names)}.") from None

    def candidates(self, seats: Sequence[Seat]) -> Candidates:
        """Propose backends for the collectives of workers that run there; see `propose`."""
        return propose(self.info, seats)

    def cost_matrix(self, num_bytes: int) -> tuple[tuple[float, ...], ...]:
        """Seconds to bring `num_bytes` from one device to another: latency + bytes / bandwidth, by place in `device_names`.

        One transfer at a time; what several share is not counted. Raises CommError: `num_bytes` is negative.
        """
        if num_bytes < 0:
            raise CommError(f"num_bytes is {num_bytes!r}; give 0 or more.")
        names = self.info.device_names
        cost = {}
        for link in self.links():
            cost[link.a, link.b] = cost[link.b, link.a] = link.seconds(num_bytes)
        return tuple(tuple(cost[a, b] for b in names) for a in names)

    @property
    def _is_own(self) -> bool:
        return Path(self._root) == Path("/sys")

    def _load_nvml(self) -> Any | None:
        return self._nvml if self._nvml is not None or not self._is_own else load_nvml()
