"""Small sysfs trees: real folders and links, as the kernel lays them out, of machines that are not here."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

CLASSES = {"gpu": "0x030200", "nic": "0x020000", "infiniband": "0x020700", "nvme": "0x010802", "bridge": "0x060400"}
VENDORS = {"gpu": "0x10de", "nic": "0x15b3", "infiniband": "0x15b3", "nvme": "0x144d", "bridge": "0x1000"}


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("bus/pci/devices", "class/net", "devices"):
            (root / folder).mkdir(parents=True)

    def write(self, path: str, files: Mapping[str, object]) -> Path:
        for name, value in files.items():
            file = self.root / path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
        return self.root / path

    def link(self, path: str, target: Path) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(target, place.parent))

    def node(self, index: int, cpus: str, distance: str, socket: int = 0, memory_kb: int = 1 << 20) -> None:
        files = {"cpulist": cpus, "distance": distance, "meminfo": f"Node {index} MemTotal:       {memory_kb} kB"}
        self.write(f"devices/system/node/node{index}", files)
        if cpus:
            first = int(cpus.split("-")[0].split(",")[0])
            cpu = {"topology/physical_package_id": socket, "cache/index3/size": "32768K"}
            self.write(f"devices/system/cpu/cpu{first}", cpu)

    def pci(
        self, path: str, kind: str = "bridge", node: int = 0, gts: str = "16.0 GT/s PCIe", width: int = 16, **files: object
    ) -> Path:
        """`path`: from the host bridge down, separated by /."""
        given = {
            "class": CLASSES[kind],
            "vendor": VENDORS[kind],
            "device": "0x2330",
            "numa_node": node,
            "max_link_speed": gts,
            "current_link_speed": "2.5 GT/s PCIe",  # links slow down while idle
            "current_link_width": width,
            "max_link_width": 16,
        }
        folder = self.write(f"devices/{path}", {**given, **files})
        self.link(f"bus/pci/devices/{path.rpartition('/')[2]}", folder)
        return folder

    def nic(self, name: str, device: Path | None, speed: object = 100_000, state: str = "up", hardware: int = 1) -> None:
        parent = device or self.root / "devices/virtual"
        folder = self.write(str((parent / "net" / name).relative_to(self.root)), {"type": hardware, "operstate": state})
        (folder / "speed").write_text(f"{speed}\n")
        self.link(f"class/net/{name}", folder)

    def hca(self, name: str, device: Path, rate: str = "200 Gb/sec (4X HDR)", layer: str = "InfiniBand") -> None:
        port = {"ports/1/rate": rate, "ports/1/state": "4: ACTIVE", "ports/1/link_layer": layer}
        folder = self.write(str((device / "infiniband" / name).relative_to(self.root)), port)
        (folder / "device").symlink_to("../..")
        self.link(f"class/infiniband/{name}", folder)


def two_sockets(root: Path) -> Tree:
    """Four GPUs, an RDMA NIC with a virtual function, an Ethernet NIC and an NVMe on two sockets.

    The RDMA NIC, gpu0 and gpu1 are below one switch; between this switch and gpu1 is a second one. GPU gpu2 has a host bridge
    of its own on the same socket. The other socket has gpu3, eth0 and nvme0.
    """
    tree = Tree(root)
    tree.node(0, "0-15,32-47", "10 21", socket=0)
    tree.node(1, "16-31,48-63", "21 10", socket=1)
    switch = "pci0000:16/0000:16:01.0/0000:17:00.0"
    for path in ("pci0000:16/0000:16:01.0", switch, *(f"{switch}/0000:18:0{port}.0" for port in range(3))):
        tree.pci(path)
    tree.pci(f"{switch}/0000:18:00.0/0000:19:00.0", "gpu")
    card = tree.pci(f"{switch}/0000:18:01.0/0000:1a:00.0", "infiniband", gts="32.0 GT/s PCIe")
    function = tree.pci(f"{switch}/0000:18:01.0/0000:1a:00.2", "infiniband")
    (function / "physfn").symlink_to("../0000:1a:00.0")
    second = f"{switch}/0000:18:02.0/0000:1b:00.0"
    for path in (second, f"{second}/0000:1c:00.0"):
        tree.pci(path)
    tree.pci(f"{second}/0000:1c:00.0/0000:1d:00.0", "gpu", width=8)
    tree.pci("pci0000:20/0000:20:01.0", gts="8.0 GT/s PCIe")
    tree.pci("pci0000:20/0000:20:01.0/0000:21:00.0", "gpu")
    for port in (1, 2, 3):
        tree.pci(f"pci0000:80/0000:80:0{port}.0", node=1)
    tree.pci("pci0000:80/0000:80:01.0/0000:81:00.0", "gpu", node=1)
    nvme = tree.pci("pci0000:80/0000:80:02.0/0000:82:00.0", "nvme", node=1, width=4)
    ethernet = tree.pci("pci0000:80/0000:80:03.0/0000:83:00.0", "nic", node=1)
    controller = tree.write(str((nvme / "nvme/nvme0").relative_to(root)), {"state": "live"})
    (controller / "device").symlink_to("../..")
    tree.link("class/nvme/nvme0", controller)
    tree.nic("ib0", card, speed=-1, hardware=32)
    tree.nic("ib0v0", function, speed=-1, hardware=32)
    tree.hca("mlx5_0", card)
    tree.hca("mlx5_1", function)
    tree.nic("eth0", ethernet)
    tree.nic("lo", None, speed="", state="unknown", hardware=772)
    tree.pci("pci0000:80/0000:80:04.0", "gpu", node=1, vendor="0x1a03")  # the chip that shows the console
    return tree


def nvml(addresses: list[str], links: Mapping[int, list[str]], version: int = 4) -> SimpleNamespace:
    """NVML's functions for GPUs at these addresses; `links`: index -> what each NVLink leads to. Others raise, as NVML does."""

    def lead(index: int, link: int) -> str:
        if link >= len(links.get(index, [])):
            raise RuntimeError("Not Supported")
        return links[index][link]

    def kind(index: int, link: int) -> int:
        return 0 if lead(index, link) in addresses else 2

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(addresses),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda index: b"NVIDIA H100",
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
        nvmlDeviceGetPciInfo=lambda index: SimpleNamespace(busId=f"0000{addresses[index].upper()}".encode()),
        nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(total=80 << 30),
        nvmlDeviceGetNvLinkState=lambda index, link: 1 if lead(index, link) else 0,
        nvmlDeviceGetNvLinkVersion=lambda index, link: version,
        nvmlDeviceGetNvLinkRemoteDeviceType=kind,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda index, link: SimpleNamespace(busId=lead(index, link).encode()),
    )
