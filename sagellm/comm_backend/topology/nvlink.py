"""GPUs by NVML, with their NVLinks. `pynvml` is optional. Not run on hardware yet: tests use an object of NVML's functions.

Source: NVML API reference, groups "Device Queries" and "NvLink Methods".
"""

import importlib
import re
from collections import Counter
from typing import Any

from sagellm.comm_backend.topology.base import SWITCH, Gpu, NvLinks, PciDevice
from sagellm.comm_backend.topology.pci import VENDORS
from sagellm.comm_backend.topology.sysfs import Sysfs

__all__ = ["detect_gpus", "load_nvml"]

MAX_LINKS = 18  # NVML_NVLINK_MAX_LINKS
BUS_ID = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


def load_nvml() -> Any | None:
    """NVML's functions; None where no binding is installed."""
    try:
        return importlib.import_module("pynvml")
    except Exception:  # a broken binding counts as missing
        return None


def detect_gpus(sysfs: Sysfs, pci: tuple[PciDevice, ...], nvml: Any | None) -> tuple[Gpu, ...]:
    """Those that NVML knows, in its order, then the other GPUs and accelerators of sysfs."""
    known = {device.address: device for device in pci}
    gpus = _nvml_gpus(sysfs, known, nvml)
    named = {gpu.address for gpu in gpus}
    for device in pci:
        if device.kind in ("gpu", "accelerator") and device.address not in named and device.physical_function is None:
            name = f"{VENDORS.get(device.vendor, device.vendor)} {device.device}"
            place = {"index": len(gpus), "address": device.address, "numa_node": device.numa_node}
            gpus.append(Gpu(name=name, vendor=device.vendor, **place))
    if nvml is None and any(gpu.vendor == "10de" for gpu in gpus):
        sysfs.note("there are NVIDIA GPUs, and no pynvml to ask for their NVLinks: pip install nvidia-ml-py")
    return tuple(gpus)


def _nvml_gpus(sysfs: Sysfs, known: dict[str, PciDevice], nvml: Any | None) -> list[Gpu]:
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
    except Exception as error:
        if any(device.vendor == "10de" and device.kind == "gpu" for device in known.values()):
            sysfs.note(f"NVML: {error}; NVLinks are not known")
        return []
    gpus: list[Gpu] = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            gpus.append(_gpu(sysfs, index, known, nvml))
    except Exception as error:
        sysfs.note(f"NVML: {error}; GPUs from {len(gpus)} on are named by PCI address")
    finally:
        _ask(nvml, "nvmlShutdown")
    return gpus


def _gpu(sysfs: Sysfs, index: int, known: dict[str, PciDevice], nvml: Any) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    address = _address(nvml.nvmlDeviceGetPciInfo(handle).busId)
    if address is None:
        raise ValueError(f"GPU {index} has no PCI address")
    device = known.get(address)
    if device is None:
        sysfs.note(f"gpu{index} ({address}) is not in sysfs; how far it is from others is not known")
    return Gpu(
        index=index,
        name=_text(_ask(nvml, "nvmlDeviceGetName", handle) or "NVIDIA GPU"),
        address=address,
        vendor="10de",
        numa_node=device.numa_node if device else None,
        memory_bytes=getattr(_ask(nvml, "nvmlDeviceGetMemoryInfo", handle), "total", None),
        uuid=_text(_ask(nvml, "nvmlDeviceGetUUID", handle) or "") or None,
        nvlinks=_nvlinks(handle, nvml),
    )


def _nvlinks(handle: Any, nvml: Any) -> tuple[NvLinks, ...]:
    counts: Counter[str] = Counter()
    version = None
    for link in range(MAX_LINKS):
        if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) != 1:  # also where the GPU has no such link
            continue
        version = _ask(nvml, "nvmlDeviceGetNvLinkVersion", handle, link) or version
        is_gpu = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) in (0, None)  # 0: a GPU; None: an old driver
        remote = _address(getattr(_ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link), "busId", ""))
        counts[remote if is_gpu and remote else SWITCH] += 1
    return tuple(NvLinks(peer=peer, count=count, version=version) for peer, count in sorted(counts.items()))


def _ask(nvml: Any, name: str, *arguments: Any) -> Any:
    """NVML says "not supported" by an exception whose class depends on the binding; an old binding lacks functions."""
    try:
        return getattr(nvml, name)(*arguments)
    except Exception:
        return None


def _address(bus_id: Any) -> str | None:
    """NVML's domain has 8 digits, sysfs's 4 unless it needs more."""
    found = BUS_ID.fullmatch(_text(bus_id))
    return f"{int(found[1], 16):04x}:{found[2]}:{found[3]}.{found[4]}".lower() if found else None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
