"""Copies of blocks by a kernel, in Triton's interpreter."""

from importlib import import_module

import pytest
import torch

from tests.engines.lmdeploy.interpreted import fresh, needs_triton

pytestmark = needs_triton
KERNELS = "sagellm.engines.lmdeploy.kernels"


@pytest.fixture(scope="module")
def kernels():
    with pytest.MonkeyPatch.context() as patch, fresh("triton", KERNELS):
        patch.setenv("TRITON_INTERPRET", "1")
        yield import_module(f"{KERNELS}.block_copy")


@pytest.mark.parametrize("shape", [(64, 8, 128), (16, 2, 2), (1, 1, 24)])  # several programs, one, less than one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_named_blocks_are_copied_and_no_others(kernels, shape, dtype):
    source, target = (
        torch.randint(0, 200, (3, blocks, *shape), generator=torch.Generator().manual_seed(blocks)).to(dtype)
        for blocks in (7, 11)
    )
    expected = target.clone()
    pairs = torch.tensor([[6, 0], [0, 10], [3, 4]])
    expected[:, pairs[:, 1]] = source[:, pairs[:, 0]]
    before = source.clone()
    kernels.copy_blocks(source, target, pairs)
    assert torch.equal(target, expected) and torch.equal(source, before)
