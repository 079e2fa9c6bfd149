"""PCI devices of interest and the bridges above them. Source: Linux, ABI/testing/sysfs-bus-pci; PCI class codes."""

import re
from pathlib import Path
from typing import Any

from sagellm.comm_backend.topology.base import PciDevice
from sagellm.comm_backend.topology.sysfs import Sysfs

__all__ = ["ADDRESS", "VENDORS", "address_above", "detect_pci"]

ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
DEVICES = "bus/pci/devices"
VENDORS = {
    "10de": "NVIDIA", "1002": "AMD", "8086": "Intel", "15b3": "Mellanox", "14e4": "Broadcom", "1af4": "virtio",
    "19e5": "Huawei", "cabc": "Cambricon", "1d22": "Baidu", "1ed2": "Cambricon", "1d0f": "Amazon", "1ae0": "Google",
}  # fmt: skip
# Devices that show a console and compute nothing: boards' management chips and virtual screens.
SCREENS = {"1a03", "102b", "1234", "1b36", "1af4", "15ad", "1414", "80ee", "1013"}
KINDS = {0x0300: "gpu", 0x0302: "gpu", 0x0380: "gpu", 0x1200: "accelerator", 0x0200: "nic", 0x0280: "nic", 0x0207: "infiniband"}
NVME = 0x010802


def detect_pci(sysfs: Sysfs) -> tuple[PciDevice, ...]:
    found: dict[str, PciDevice] = {}
    for address in sysfs.names(DEVICES):
        if ADDRESS.fullmatch(address) and (kind := _kind(sysfs, f"{DEVICES}/{address}")):
            found[address] = _device(sysfs, address, kind)
    above = {bridge for device in found.values() for bridge in device.path[1:-1]} - set(found)
    bridges = {bridge: _device(sysfs, bridge, "bridge") for bridge in above}
    return tuple(device for _, device in sorted({**found, **bridges}.items()))


def address_above(path: Path | None) -> str | None:
    """The address of the PCI device in or below whose folder this is: virtio puts a folder of its own between."""
    for part in reversed(path.parts if path else ()):
        if ADDRESS.fullmatch(part):
            return part
    return None


def _kind(sysfs: Sysfs, folder: str) -> str | None:
    code = sysfs.number(folder, "class")
    if code is None:
        return None
    if code == NVME:
        return "nvme"
    kind = KINDS.get(code >> 8)
    vendor = _hexadecimal(sysfs.number(folder, "vendor"))
    return None if kind == "gpu" and vendor in SCREENS else kind


def _device(sysfs: Sysfs, address: str, kind: Any) -> PciDevice:
    folder = f"{DEVICES}/{address}"
    real = sysfs.real(folder)
    parts = real.parts if real else ()
    start = next((place for place, part in enumerate(parts) if HOST_BRIDGE.fullmatch(part)), None)
    path = tuple(part for part in parts[start:] if ADDRESS.fullmatch(part)) if start is not None else ()
    if start is None or not path or path[-1] != address:
        sysfs.note(f"{folder}: no path from a host bridge; distances from it are taken for the longest")
        path, root = (address,), f"unknown of {address}"
    else:
        root = parts[start]
    gts, width = _link(sysfs, folder, path)
    physical = sysfs.real(folder, "physfn")
    return PciDevice(
        address=address,
        kind=kind,
        vendor=_hexadecimal(sysfs.number(folder, "vendor")),
        device=_hexadecimal(sysfs.number(folder, "device")),
        numa_node=sysfs.number(folder, "numa_node"),
        path=(root, *path),
        link_gts=gts,
        link_width=width,
        physical_function=physical.name if physical and ADDRESS.fullmatch(physical.name) else None,
    )


def _link(sysfs: Sysfs, folder: str, path: tuple[str, ...]) -> tuple[float | None, int | None]:
    """A link is as fast as its slower end can be; the port above it may be older than the card."""
    ends = [folder, *([f"{DEVICES}/{path[-2]}"] if len(path) > 1 else [])]
    speeds = [speed for end in ends if (speed := _gts(sysfs, end, "max_link_speed") or _gts(sysfs, end, "current_link_speed"))]
    width = sysfs.number(folder, "current_link_width", low=1) or sysfs.number(folder, "max_link_width", low=1)
    if width and width > 32:  # 255 is "unknown"; PCIe has 32 lanes at most
        width = None
    return (min(speeds) if speeds else None), width


def _gts(sysfs: Sysfs, folder: str, name: str) -> float | None:
    found = sysfs.matched(r"^(\d{1,3}(?:\.\d+)?) GT/s", folder, name)
    return float(found[1]) or None if found else None


def _hexadecimal(number: int | None) -> str:
    return "" if number is None else f"{number:04x}"
