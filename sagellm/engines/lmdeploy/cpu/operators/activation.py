"""Gated activations."""

import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.activation import SiluAndMulBuilder, SiluAndMulImpl

from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily


class CpuSiluAndMulImpl(SiluAndMulImpl):
    """silu(gate) * up for x = [gate, up]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [..., 2 * size]; returns [..., size], contiguous, as the linear layer after it wants."""
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)


class CpuSiluAndMulBuilder(SiluAndMulBuilder):
    @staticmethod
    def build(inplace: bool = False) -> CpuSiluAndMulImpl:
        return CpuSiluAndMulImpl()


FAMILY = OperatorFamily(builders={"SiluAndMul": CpuSiluAndMulBuilder})
