"""Process groups of vendors' libraries: the same backend as gloo's and NCCL's, made by what a plug-in of torch registers.

Not run on hardware yet. Without it each says what is missing.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sagellm.comm_backend.domestic.libraries import library, missing, require, torch_backend
from sagellm.comm_backend.torch_groups import NcclBackend
from sagellm.core.errors import CommError

__all__ = ["BkclBackend", "CnclBackend", "HcclBackend", "McclBackend", "RcclBackend", "VendorBackend", "process_group"]


def process_group(name: str, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    """A group of its own, not the default one of the process, by what is registered with torch.distributed.

    Raises CommError: nothing is registered for that library.
    """
    registered = torch_backend(library(name))
    if registered == "nccl":  # built into torch, also where it stands for RCCL
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    plugin = dist.Backend._plugins.get(registered.upper())
    if plugin is None:
        raise CommError(f"{name}: torch.distributed names {registered}, but no plug-in has registered how to make its groups.")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, world_size, timeout)
    wanted = dist.distributed_c10d._DistributedBackendOptions()
    wanted.store, wanted.group_rank, wanted.group_size, wanted.timeout = store, rank, world_size, timeout
    wanted.group_id, wanted.global_ranks_in_group = f"sagellm_{name}", list(range(world_size))
    return plugin.creator_fn(wanted, None)


class VendorBackend(NcclBackend):
    """Tensors on the vendor's devices, one a rank: that of the rank's current device. Work ends on the host, as with NCCL."""

    def __init_subclass__(cls) -> None:
        if "device_types" not in vars(cls):
            cls.device_types = (library(cls.name).device_type,)

    @classmethod
    def missing(cls) -> str:
        return missing(cls.name)

    def _make_group(self, store: dist.Store, timeout: timedelta) -> Any:
        require(self.name)
        return process_group(self.name, store, self.rank, self.world_size, 4 * timeout)  # the deadlines here come first

    def _break_group(self) -> None:
        abort = getattr(self._group, "abort", None) or getattr(self._group, "shutdown", None)
        if abort is not None:
            abort()


class HcclBackend(VendorBackend):
    """Huawei Ascend, by torch_npu."""

    name = "hccl"


class CnclBackend(VendorBackend):
    """Cambricon, by torch_mlu."""

    name = "cncl"


class RcclBackend(VendorBackend):
    """AMD, by a torch that is built for ROCm."""

    name = "rccl"


class BkclBackend(VendorBackend):
    """Baidu Kunlunxin, by torch_xmlir, whose devices answer as CUDA's."""

    name = "bkcl"


class McclBackend(VendorBackend):
    """MetaX, by a torch that is built for MACA, whose devices answer as CUDA's."""

    name = "mccl"
