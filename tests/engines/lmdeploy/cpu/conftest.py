"""Each test begins with one seed, and may run with the kernels of one instruction set."""

import pytest
import torch

from sagellm.engines.lmdeploy.cpu import packed
from sagellm.engines.lmdeploy.cpu.packed import kernels_of


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def isa(request, monkeypatch):
    monkeypatch.setattr(packed, "kernels", lambda dtype: kernels_of(dtype, request.param))
    return request.param
