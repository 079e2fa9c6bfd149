"""Vendors' libraries of collectives: which of them this machine could use, and backends by their names.

All of them are reached as backends of torch.distributed, which a vendor's build of torch or a plug-in of torch brings. Looking
imports no plug-in: some take seconds, or fail where there is no device. None of the plug-ins has been run with this project.

The vendors are rows of the table in `sagellm.accel.kernels.domestic`.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sagellm.accel.kernels.domestic import VENDORS, Vendor
from sagellm.accel.kernels.domestic.probe import find_nodes, has_module, shown_nodes
from sagellm.core.enums import StrEnum
from sagellm.core.errors import CommError
from sagellm.core.options import find_row

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
        vendors: its rows in the table of vendors.
    """

    name: str
    vendor: str
    lmdeploy_device: str
    device_type: str
    plugin: str
    torch_backends: tuple[str, ...]
    vendors: tuple[Vendor, ...]


class VendorState(NamedTuple):
    """`reason`: what was found, or what is missing and what to do."""

    library: VendorLibrary
    state: State
    reason: str


def _libraries() -> tuple[VendorLibrary, ...]:
    """A library for each name in the table of vendors; two vendors may share one."""
    found: dict[str, VendorLibrary] = {}
    for each in VENDORS:
        one = VendorLibrary(
            each.collective, each.title, each.lmdeploy_device, each.torch_device, each.plugin, each.torch_backends, (each,)
        )
        before = found.get(each.collective)
        if before is not None:
            one = before._replace(vendor=f"{before.vendor}, {each.title}", vendors=(*before.vendors, each))
        found[each.collective] = one
    return tuple(found.values())


LIBRARIES = _libraries()


def library(name: str) -> VendorLibrary:
    """Raises CommError: unknown."""
    return find_row(LIBRARIES, name.lower(), "vendor library", CommError)


def vendor_libraries(dev: Path = Path("/dev"), is_installed: Callable[[str], bool] | None = None) -> list[VendorState]:
    """A row for each library. `usable` says that torch or the plug-in and a device are there, not that it was tried.

    Args:
        dev: where device nodes are.
        is_installed: whether a module is; by default it is looked for without importing it.
    """
    installed = is_installed or has_module
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
    nodes = [node for vendor in which.vendors for node in find_nodes(vendor, dev)]
    if nodes:
        return VendorState(which, State.USABLE, f"{which.plugin} and {nodes[0]} are there")
    looked_for = ", ".join(str(dev / shown_nodes(vendor)) for vendor in which.vendors)
    return VendorState(which, State.NO_DEVICE, f"{which.plugin} is there, but no {looked_for}")


def _torch_state(which: VendorLibrary) -> VendorState:
    """Libraries that are part of torch, which is built for one of CUDA, ROCm and MACA, or for none."""
    import torch

    is_maca = "metax" in torch.__version__
    builds = {
        "nccl": ("CUDA", None if is_maca else torch.version.cuda), "rccl": ("ROCm", torch.version.hip),
        "mccl": ("MACA", torch.__version__ if is_maca else None),
    }  # fmt: skip
    wanted, built = builds[which.name]
    if not built:
        return VendorState(which, State.NOT_INSTALLED, f"needs a torch built for {wanted}; this one is {torch.__version__}")
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return VendorState(which, State.NOT_INSTALLED, f"torch {torch.__version__} is built without {which.name.upper()}")
    if not torch.cuda.is_available():
        return VendorState(which, State.NO_DEVICE, f"torch is built for {wanted} {built} and finds no GPU")
    return VendorState(which, State.USABLE, f"torch for {wanted} {built}, {torch.cuda.device_count()} GPUs")
