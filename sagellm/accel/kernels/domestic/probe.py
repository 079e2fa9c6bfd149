"""Find accelerators by device files, runtime libraries and plug-ins of torch, without importing or loading any of them here."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from sagellm.accel.kernels.domestic.vendors import VENDORS, Vendor

__all__ = ["Found", "Lack", "find_nodes", "has_module", "loader_folders", "probe", "shown_nodes"]

LOAD_S = 20.0  # a driver may take seconds to load
SYSTEM = ("lib", "usr/lib", "lib64", "usr/lib64")  # what the loader searches without being told


class Lack(NamedTuple):
    """Something that is missing, and how to get it."""

    what: str
    how: str


class Found(NamedTuple):
    """One vendor on a machine.

    Attributes:
        nodes: its device files.
        libraries: name of each library -> its file, for those that are there.
        torch: the plug-in of torch, or the version of a torch that is built for it; empty where neither is there.
        lacks: what is missing.
    """

    vendor: Vendor
    nodes: tuple[Path, ...]
    libraries: dict[str, Path]
    torch: str
    lacks: tuple[Lack, ...]

    @property
    def is_here(self) -> bool:
        """Whether a device, a library of its runtime or its plug-in of torch is there."""
        return bool(self.nodes or self.libraries or self.torch)


def probe(
    root: Path = Path("/"), folders: Sequence[Path] | None = None, modules: Sequence[str] | None = None,
    vendors: Iterable[Vendor] = VENDORS,
) -> list[Found]:  # fmt: skip
    """Look for the devices of each vendor, and return those that are there.

    Args:
        root: folder below which device files and installations are looked for.
        folders: where the loader finds libraries; by default those of this machine's loader.
        modules: folders of Python modules; by default `sys.path`.
    """
    searched = loader_folders(root) if folders is None else folders
    is_this = root == Path("/") and folders is None
    there = (vendor for vendor in vendors if not _is_another(vendor, root))
    found = (_probe_one(vendor, root, searched, modules, () if is_this else searched) for vendor in there)
    return [each for each in found if each.is_here]


def find_nodes(vendor: Vendor, dev: Path) -> tuple[Path, ...]:
    """Return the device files of a vendor. Returns none where they belong to another one that names them too."""
    try:
        names = sorted(entry.name for entry in dev.iterdir())
    except OSError:
        return ()
    if _is_another(vendor, dev.parent) or (vendor.marks and not _is_marked(vendor, dev.parent)):
        return ()
    return tuple(dev / name for name in names if re.fullmatch(vendor.nodes, name))


def shown_nodes(vendor: Vendor) -> str:
    """Return the names of its device files as a pattern of the shell."""
    return vendor.nodes.split("|")[0].replace(r"\d+", "*").replace(r"\d*", "")


def has_module(name: str, folders: Sequence[str] | None = None) -> bool:
    """Whether a top-level module can be imported, found without importing it."""
    if folders is None and name in sys.modules:
        return sys.modules[name] is not None
    return PathFinder.find_spec(name, folders) is not None


def loader_folders(root: Path = Path("/")) -> list[Path]:
    """Return the folders in which the loader looks for libraries: the environment's, configured ones, the system's."""
    given = [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part] if root == Path("/") else []
    configured: list[Path] = []
    for file in (root / "etc/ld.so.conf", *sorted((root / "etc/ld.so.conf.d").glob("*.conf"))):
        if file.is_file():
            lines = (line.partition("#")[0].strip() for line in file.read_text(errors="replace").splitlines())
            configured += [root / line.lstrip("/") for line in lines if line.startswith("/")]
    return [*given, *configured, *(root / folder for folder in SYSTEM)]


def _probe_one(
    vendor: Vendor, root: Path, folders: Sequence[Path], modules: Sequence[str] | None, told: Sequence[Path]
) -> Found:  # fmt: skip
    """`told`: folders that this machine's loader does not know."""
    nodes = find_nodes(vendor, root / "dev")
    lacks = [] if nodes else [Lack(f"no device /dev/{shown_nodes(vendor)}", "insert the card, or give it to the container")]
    libraries: dict[str, Path] = {}
    homes = [home for pattern in vendor.homes for home in sorted(root.glob(pattern))]
    for name in vendor.libraries:
        if (file := _library(name, folders)) is not None:
            libraries[name] = file
            if why := _cannot_load(file, told):
                lacks.append(Lack(f"{file} does not load: {why}", vendor.setup or vendor.get_runtime))
        elif (file := _library(name, homes)) is not None:
            libraries[name] = file
            lacks.append(Lack(f"{file} is not where the loader looks", vendor.setup or f"export LD_LIBRARY_PATH={file.parent}"))
        else:
            lacks.append(Lack(f"no {name}", vendor.get_runtime))
    torch = _torch(vendor, modules)
    if vendor.torch_build and not vendor.plugin and not (nodes or libraries):
        torch = ""  # a torch that is built for several vendors is no sign of one of them
    if not torch:
        lacks.append(Lack(f"no {vendor.plugin}" if vendor.plugin else "torch is not built for it", vendor.get_torch))
    if vendor.needs_dlinfer and not has_module("dlinfer", modules):
        lacks.append(Lack("no dlinfer", vendor.get_dlinfer))
    return Found(vendor, nodes, libraries, torch, tuple(lacks))


def _library(name: str, folders: Iterable[Path]) -> Path | None:
    """Return the file of a library, with any version behind its name."""

    def files() -> Iterator[Path]:
        for folder in folders:
            yield folder / name
            yield from sorted(folder.glob(f"{name}.*"))

    return next((file for file in files() if file.is_file()), None)


def _cannot_load(file: Path, told: Sequence[Path]) -> str:
    """Return why a library cannot be loaded, or nothing. A process of its own does it: a driver may end the process."""
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, told))} if told else None
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    try:
        run = subprocess.run([sys.executable, "-S", "-c", code, str(file)], capture_output=True, env=env, timeout=LOAD_S)
    except subprocess.TimeoutExpired:
        return f"it takes more than {LOAD_S:g} s"
    if run.returncode == 0:
        return ""
    last = (run.stderr.decode(errors="replace").strip().splitlines() or [f"the process ended with {run.returncode}"])[-1]
    return last.removeprefix("OSError: ")


def _torch(vendor: Vendor, modules: Sequence[str] | None) -> str:
    if vendor.plugin:
        return vendor.plugin if has_module(vendor.plugin, modules) else ""
    spec = PathFinder.find_spec("torch", modules)
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return ""
    text = file.read_text()
    version = re.search(r"^__version__ = '(.*)'", text, re.MULTILINE)
    return f"torch {version[1] if version else ''}".strip() if re.search(vendor.torch_build, text, re.MULTILINE) else ""


def _is_marked(vendor: Vendor, root: Path) -> bool:
    return any((root / mark).exists() for mark in vendor.marks)


def _is_another(vendor: Vendor, root: Path) -> bool:
    """Whether files of this vendor are those of another one that names them too, and that is known by its own."""
    names = set(vendor.nodes.split("|"))
    return any(names & set(each.nodes.split("|")) and _is_marked(each, root) for each in VENDORS if each is not vendor)
