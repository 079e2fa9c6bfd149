"""Backends of vendors' libraries: refused where there is no hardware; made by what a plug-in registers with torch.

No vendor's device is here, so a plug-in stands in that registers gloo under the vendor's name.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from sagellm.comm_backend import CommConfig
from sagellm.comm_backend.domestic import libraries as vendors
from sagellm.comm_backend.domestic.groups import HcclBackend
from sagellm.comm_backend.registry import backend_names, find_backend, make_backend
from sagellm.core.errors import CommError

NAMES = ("rccl", "hccl", "cncl", "bkcl", "mccl")
PLUGIN = """
import torch.distributed as dist

def make(store, rank, size, timeout):
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)

def make_extended(wanted, options):
    assert wanted.global_ranks_in_group == [0, 1] and options is None
    return make(wanted.store, wanted.group_rank, wanted.group_size, wanted.timeout)

dist.Backend.register_backend("hccl", {maker}, extended_api={extended}, devices=["npu"])
"""


@pytest.mark.parametrize("name", NAMES)
def test_without_hardware_it_says_what_is_missing(name, tmp_path):
    if not vendors.missing(name):
        pytest.skip(f"{name} is here")
    kind = find_backend(name)
    assert name in backend_names() and kind.missing() == vendors.missing(name)
    config = CommConfig(backend=name, rank=0, world_size=1, rendezvous=f"file://{tmp_path}/meet")
    with pytest.raises(CommError, match=f"{name} .* cannot be used here: .*needs"):
        make_backend(config)
    assert kind.device_types == (vendors.library(name).device_type,)


@pytest.fixture
def plugin(tmp_path, monkeypatch, request):
    """A module torch_npu, a device node, and torch's table of backends as it was before, afterwards."""
    maker = "make_extended" if request.param else "make"
    (tmp_path / "torch_npu.py").write_text(PLUGIN.format(maker=maker, extended=request.param))
    (tmp_path / "davinci0").touch()
    monkeypatch.syspath_prepend(tmp_path)
    look = vendors.vendor_libraries
    monkeypatch.setattr(vendors, "vendor_libraries", lambda: look(dev=tmp_path))
    for name in ("backend_list", "backend_type_map", "backend_capability", "default_device_backend_map", "_plugins"):
        monkeypatch.setattr(dist.Backend, name, getattr(dist.Backend, name).copy())
    monkeypatch.setattr(dist.Backend, "HCCL", "hccl", raising=False)
    yield tmp_path
    sys.modules.pop("torch_npu", None)


@pytest.mark.parametrize("plugin", [False, True], indirect=True, ids=["plain", "extended"])
def test_a_group_by_a_plug_in(plugin):
    class OnCpu(HcclBackend):
        device_types = ("cpu",)

    def work(rank):
        config = CommConfig(backend="hccl", rank=rank, world_size=2, rendezvous=f"file://{plugin}/meet", timeout_s=20)
        with OnCpu(config) as backend:
            tensor = torch.full((5,), float(rank + 1))
            backend.all_reduce(tensor)
            rows = torch.zeros(2, 3)
            backend.all_gather(rows, torch.full((3,), float(rank)))
            backend.barrier()
            return tensor.tolist(), rows[:, 0].tolist()

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(work, range(2))) == [([3.0] * 5, [0.0, 1.0])] * 2
    assert not dist.is_initialized()
