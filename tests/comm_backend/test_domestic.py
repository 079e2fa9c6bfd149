"""Vendors' libraries: what is said of each where it is not, and where a plug-in or a device is there."""

import json
import sys

import pytest
import torch
from click.testing import CliRunner

from sagellm.cli import checks, main
from sagellm.comm_backend.domestic import libraries as vendors
from sagellm.comm_backend.domestic.libraries import LIBRARIES, State, library, require, torch_backend, vendor_libraries
from sagellm.core.errors import CommError

PLUGINS = {"hccl": ("torch_npu", "davinci0"), "cncl": ("torch_mlu", "cambricon_dev0"), "bkcl": ("torch_xmlir", "xpu0")}


def states(**arguments):
    return {row.library.name: (row.state, row.reason) for row in vendor_libraries(**arguments)}


def test_each_library_says_what_it_needs():
    found = states(is_installed=lambda module: False)
    assert list(found) == ["nccl", "rccl", "hccl", "cncl", "mccl", "bkcl"]
    for name, (plugin, _) in PLUGINS.items():
        assert found[name][0] is State.NOT_INSTALLED and plugin in found[name][1]
    if not torch.version.hip:
        assert found["rccl"] == (State.NOT_INSTALLED, f"needs a torch built for ROCm; this one is {torch.__version__}")
    if not torch.version.cuda:
        assert found["nccl"] == (State.NOT_INSTALLED, f"needs a torch built for CUDA; this one is {torch.__version__}")
    assert library("HCCL").lmdeploy_device == "ascend"
    with pytest.raises(CommError, match="known are: nccl, rccl, hccl, cncl, mccl, bkcl"):
        library("xccl")


@pytest.mark.parametrize("name", PLUGINS)
def test_a_plug_in_needs_its_device(name, tmp_path):
    plugin, node = PLUGINS[name]
    (tmp_path / f"{node}_manager").touch()  # a control node is no device
    state, reason = states(dev=tmp_path, is_installed=lambda module: module == plugin)[name]
    assert state is State.NO_DEVICE and str(tmp_path) in reason
    assert states(dev=tmp_path / "none", is_installed=lambda module: module == plugin)[name][0] is State.NO_DEVICE
    (tmp_path / node).touch()
    found = states(dev=tmp_path, is_installed=lambda module: module == plugin)
    assert found[name] == (State.USABLE, f"{plugin} and {tmp_path / node} are there")
    others = {each: state for each, (state, _) in found.items() if each in PLUGINS and each != name}
    assert set(others.values()) == {State.NOT_INSTALLED}


def test_looking_imports_no_plug_in(tmp_path, monkeypatch):
    for plugin, _ in PLUGINS.values():
        (tmp_path / f"{plugin}.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert {state for name, (state, _) in states(dev=tmp_path).items() if name in PLUGINS} == {State.NO_DEVICE}
    assert not {plugin for plugin, _ in PLUGINS.values()} & set(sys.modules)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert states()["hccl"][0] is State.NOT_INSTALLED


def test_what_cannot_be_used_says_what_is_missing(tmp_path, monkeypatch):
    with pytest.raises(CommError, match=r"^hccl \(Huawei Ascend\) cannot be used here: not installed; needs torch_npu"):
        require("hccl")
    (tmp_path / "torch_npu.py").write_text("raise OSError('libascendcl.so: cannot open')")
    (tmp_path / "torch_mlu.py").write_text("")
    (tmp_path / "davinci0").touch()
    (tmp_path / "cambricon_dev3").touch()
    monkeypatch.syspath_prepend(tmp_path)
    look = vendor_libraries
    monkeypatch.setattr(vendors, "vendor_libraries", lambda: look(dev=tmp_path))
    with pytest.raises(CommError, match="hccl.*cannot import torch_npu.*libascendcl.so"):
        require("hccl")
    monkeypatch.delitem(sys.modules, "torch_mlu", raising=False)
    with pytest.raises(CommError, match=r"cncl: torch\.distributed has no backend cncl; torch_mlu should have brought it"):
        require("cncl")
    sys.modules.pop("torch_mlu", None)
    assert torch_backend(library("rccl")) == "nccl"


def test_doctor_names_them():
    found = {finding.name: finding for finding in checks.collectives()}
    assert list(found) == [each.name for each in LIBRARIES]
    assert all(row.state.value in found[row.library.name].text for row in vendor_libraries())
    assert {finding.state for finding in found.values()} <= {checks.OK, checks.NOTE}
    document = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)
    assert {*found, *(row.name for row in checks.accelerators())} <= {check["name"] for check in document["checks"]}
