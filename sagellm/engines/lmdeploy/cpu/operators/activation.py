"""Gated activations."""

from typing import Any

import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.activation import SiluAndMulBuilder, SiluAndMulImpl
from lmdeploy.pytorch.backends.default.activation import DefaultGeluAndMulImpl

from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily


class CpuSiluAndMulImpl(SiluAndMulImpl):
    """silu(gate) * up for x = [gate, up]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [..., 2 * size]; returns [..., size], contiguous, as the linear layer after it wants."""
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)


def kind_of(activation: Any) -> str:
    """Return what the native kernels call a gated activation: silu, gelu (its tanh form), or nothing if they lack it."""
    impl = getattr(activation, "impl", None)
    if isinstance(impl, CpuSiluAndMulImpl):
        return "silu"
    return "gelu" if isinstance(impl, DefaultGeluAndMulImpl) and impl.act.approximate == "tanh" else ""


class CpuSiluAndMulBuilder(SiluAndMulBuilder):
    @staticmethod
    def build(inplace: bool = False) -> CpuSiluAndMulImpl:
        return CpuSiluAndMulImpl()


FAMILY = OperatorFamily(builders={"SiluAndMul": CpuSiluAndMulBuilder})
