"""Vendors' libraries of collectives: which of them this machine could use, and backends by their names.

All of them are reached as backends of torch.distributed, which a vendor's build of torch or a plug-in of torch brings. Looking
imports no plug-in: some take seconds, or fail where there is no device. None of the plug-ins has been run with this project.

Source: LMDeploy, pytorch/backends/*/op_backend.py (`ccl_backend`) for the dlinfer devices; the plug-ins' own documentation.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sagellm.core.enums import StrEnum
from sagellm.core.errors import CommError

__all__ = [
    "LIBRARIES",
    "State",
    "VendorLibrary",
    "VendorState",
    "library",
    "missing",
    "require",
    "torch_backend",
    "vendor_libraries",
]


class State(StrEnum):
    USABLE = "usable"
    NO_DEVICE = "plug-in installed, but no device"
    NOT_INSTALLED = "not installed"


class VendorLibrary(NamedTuple):
    """A library, and what reaches it.

    Attributes:
        lmdeploy_device: the `--device` of LMDeploy that uses it, or "".
        device_type: of torch.
        plugin: the module that adds the device to torch, "" where torch itself is built for it.
        torch_backends: names of it in torch.distributed, the first that is registered counts.
        nodes: pattern of names in /dev that say that a device of a plug-in is there; torch itself knows of its own.
    """

    name: str
    vendor: str
    lmdeploy_device: str
    device_type: str
    plugin: str
    torch_backends: tuple[str, ...]
    nodes: str


class VendorState(NamedTuple):
    """`reason`: what was found, or what is missing and what to do."""

    library: VendorLibrary
    state: State
    reason: str


LIBRARIES = (
    VendorLibrary("nccl", "NVIDIA", "cuda", "cuda", "", ("nccl",), ""),
    VendorLibrary("rccl", "AMD", "", "cuda", "", ("nccl",), ""),  # torch for ROCm keeps CUDA's names
    VendorLibrary("hccl", "Huawei Ascend", "ascend", "npu", "torch_npu", ("hccl",), r"davinci\d+"),
    VendorLibrary("cncl", "Cambricon", "camb", "mlu", "torch_mlu", ("cncl",), r"cambricon_dev\d+"),
    VendorLibrary("bkcl", "Baidu Kunlunxin", "", "cuda", "torch_xmlir", ("kccl", "nccl"), r"xpu\d+"),  # answers as CUDA
)


def library(name: str) -> VendorLibrary:
    """Raises CommError: unknown."""
    for each in LIBRARIES:
        if each.name == name.lower():
            return each
    raise CommError(f"unknown vendor library {name!r}; known are: {', '.join(each.name for each in LIBRARIES)}.")


def vendor_libraries(dev: Path = Path("/dev"), is_installed: Callable[[str], bool] | None = None) -> list[VendorState]:
    """A row for each library. `usable` says that torch or the plug-in and a device are there, not that it was tried.

    Args:
        dev: where device nodes are.
        is_installed: whether a module is; by default it is looked for without importing it.
    """
    installed = is_installed or _is_installed
    return [_plugin_state(each, dev, installed) if each.plugin else _torch_state(each) for each in LIBRARIES]


def missing(name: str) -> str:
    """Why a library cannot be used here, or "" where nothing is seen to be missing. Raises CommError: unknown."""
    which = library(name)
    found = next(state for state in vendor_libraries() if state.library is which)
    is_usable = found.state is State.USABLE
    return "" if is_usable else f"{which.name} ({which.vendor}) cannot be used here: {found.state}; {found.reason}."


def require(name: str) -> VendorLibrary:
    """The library, its plug-in imported and a name of it registered with torch.distributed.

    Raises:
        CommError: says what is missing.
    """
    if reason := missing(name):
        raise CommError(reason)
    which = library(name)
    if which.plugin:
        try:
            importlib.import_module(which.plugin)
        except Exception as error:  # a plug-in may raise anything while it looks for its driver
            raise CommError(f"{name} ({which.vendor}): cannot import {which.plugin} ({error!r}).") from error
    torch_backend(which)
    return which


def torch_backend(which: VendorLibrary) -> str:
    """Its name in torch.distributed. Raises CommError: none is registered."""
    import torch.distributed as dist

    known = dist.Backend.backend_list if dist.is_available() else []
    for name in which.torch_backends:
        if name in known:
            return name
    raise CommError(
        f"{which.name}: torch.distributed has no backend {' or '.join(which.torch_backends)}; "
        f"{which.plugin or 'this torch'} should have brought it; it has {', '.join(known) or 'none'}."
    )


def _plugin_state(which: VendorLibrary, dev: Path, installed: Callable[[str], bool]) -> VendorState:
    if not installed(which.plugin):
        return VendorState(which, State.NOT_INSTALLED, f"needs {which.plugin} from {which.vendor}")
    if node := _node(dev, which.nodes):
        return VendorState(which, State.USABLE, f"{which.plugin} and {node} are there")
    looked_for = which.nodes.replace(r"\d+", "*")
    return VendorState(which, State.NO_DEVICE, f"{which.plugin} is there, but no {dev / looked_for}")


def _torch_state(which: VendorLibrary) -> VendorState:
    """NCCL and RCCL are part of torch, which is built for one of CUDA and ROCm, or for neither."""
    import torch

    wants_hip = which.name == "rccl"
    built, wanted = (torch.version.hip if wants_hip else torch.version.cuda), "ROCm" if wants_hip else "CUDA"
    if not built:
        return VendorState(which, State.NOT_INSTALLED, f"needs a torch built for {wanted}; this one is {torch.__version__}")
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return VendorState(which, State.NOT_INSTALLED, f"torch {torch.__version__} is built without {which.name.upper()}")
    if not torch.cuda.is_available():
        return VendorState(which, State.NO_DEVICE, f"torch is built for {wanted} {built} and finds no GPU")
    return VendorState(which, State.USABLE, f"torch for {wanted} {built}, {torch.cuda.device_count()} GPUs")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: a module of that name was put into sys.modules by hand
        return False


def _node(dev: Path, pattern: str) -> str | None:
    try:
        names = sorted(entry.name for entry in dev.iterdir())
    except OSError:
        return None
    return next((str(dev / name) for name in names if re.fullmatch(pattern, name)), None)
