"""Network interfaces and RDMA devices. Source: Linux, ABI/testing/sysfs-class-net, ABI/stable/sysfs-class-infiniband."""

import re
from typing import Any

from sagellm.comm_backend.topology.base import Nic, Nvme
from sagellm.comm_backend.topology.pci import DEVICES, address_above
from sagellm.comm_backend.topology.sysfs import Sysfs

__all__ = ["detect_nics", "detect_nvmes"]

NET, RDMA = "class/net", "class/infiniband"
LOOPBACK, INFINIBAND = 772, 32  # ARPHRD_...
TAKEN = re.compile(r"(numa|gpu|nvme)\d+|net")
MAX_MBITS = 10_000_000  # 10 Tbit/s; an unknown speed is -1, which older drivers write as 2**32 - 1


def detect_nics(sysfs: Sysfs) -> tuple[Nic, ...]:
    """An interface and the RDMA device of the same PCI device are one NIC."""
    nics = {name: _interface(sysfs, name) for name in sysfs.names(NET) if sysfs.real(NET, name)}
    for hca in sysfs.names(RDMA):
        port = _port(sysfs, hca)
        address = address_above(sysfs.real(RDMA, hca, "device"))
        owners = [name for name, nic in nics.items() if address and nic.address == address and nic.hca is None]
        if not owners:
            name = f"rdma:{hca}" if hca in nics else hca
            nics[name] = Nic(name=_own_name(name), hca=hca, address=address, numa_node=_numa(sysfs, address), **port)
        for name in owners:
            nic = nics[name]
            known = {field: value for field, value in port.items() if value is not None}
            if nic.bits_per_s:
                known.pop("bits_per_s", None)
            nics[name] = nic.model_copy(update={**known, "hca": hca})
    return tuple(nics.values())


def detect_nvmes(sysfs: Sysfs) -> tuple[Nvme, ...]:
    found = []
    for name in sysfs.names("class/nvme"):
        if address := address_above(sysfs.real("class/nvme", name, "device")):
            found.append(Nvme(name=name, address=address, numa_node=_numa(sysfs, address)))
    return tuple(found)


def _interface(sysfs: Sysfs, name: str) -> Nic:
    folder = f"{NET}/{name}"
    address = address_above(sysfs.real(folder))
    hardware = sysfs.number(folder, "type")
    kind: Any = "ethernet" if address else "virtual"
    if hardware in (LOOPBACK, INFINIBAND):
        kind = {LOOPBACK: "loopback", INFINIBAND: "infiniband"}[hardware]
    mbits = sysfs.number(folder, "speed", low=1)
    state = sysfs.text(folder, "operstate")
    return Nic(
        name=_own_name(name),
        kind=kind,
        address=address,
        numa_node=_numa(sysfs, address),
        bits_per_s=1e6 * mbits if mbits and mbits <= MAX_MBITS else None,
        is_up={"up": True, "down": False}.get(state or ""),
    )


def _port(sysfs: Sysfs, hca: str) -> dict[str, Any]:
    """Return the fastest active port of an RDMA device."""
    best: dict[str, Any] = {"kind": "infiniband", "bits_per_s": None, "is_up": None}
    for port in sysfs.names(RDMA, hca, "ports"):
        folder = f"{RDMA}/{hca}/ports/{port}"
        rate = sysfs.matched(r"^(\d{1,5}(?:\.\d+)?) Gb/sec", folder, "rate")
        bits = 1e9 * float(rate[1]) if rate and float(rate[1]) > 0 else None
        is_up = "ACTIVE" in (sysfs.text(folder, "state") or "")
        kind = "roce" if sysfs.text(folder, "link_layer") == "Ethernet" else "infiniband"
        if best["is_up"] is None or (is_up, bits or 0) > (best["is_up"], best["bits_per_s"] or 0):
            best = {"kind": kind, "bits_per_s": bits, "is_up": is_up}
    return best


def _own_name(name: str) -> str:
    """Interfaces may have any name, also one that another device has here."""
    return f"nic:{name}" if TAKEN.fullmatch(name) else name


def _numa(sysfs: Sysfs, address: str | None) -> int | None:
    return sysfs.number(DEVICES, address, "numa_node") if address else None
