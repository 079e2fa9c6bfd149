"""Muon in float32 against torch's, which rounds to bfloat16."""

import pytest
import torch

from sagellm.demo_model.muon import Muon, orthogonalized


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_updates_are_those_of_torch_but_for_rounding(shape):
    torch.manual_seed(0)
    start = torch.randn(shape)
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [Muon([ours], **settings), torch.optim.Muon([theirs], **settings)]
    for _ in range(4):
        gradient = torch.randn(shape)
        for matrix, optimizer in zip((ours, theirs), optimizers, strict=True):
            matrix.grad = gradient.clone()
            optimizer.step()
    moved = (theirs - start).norm()
    assert moved > 0.1 and (ours - theirs).norm() < 0.02 * moved


def test_singular_values_come_near_1():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalized(torch.randn(12, 40)))
    assert values.min() > 0.6 and values.max() < 1.3
