"""Root-mean-square norm (Zhang and Sennrich, 2019) with the residual added first."""

import torch
from lmdeploy.pytorch.backends.norm import RMSNormBuilder, RMSNormImpl

from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily


class CpuRMSNormImpl(RMSNormImpl):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        self._size = hidden_size
        self.epsilon = eps

    def forward(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None):
        """`x`, `residual`: [..., hidden_size]. Returns the norm, and with a residual also the sum."""
        if residual is None:
            return self._norm(x, weight)
        total = x + residual
        return self._norm(total, weight), total

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """In float32. One reduction, and few calls: at a decode step's size their number is what they cost."""
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().div_(self._size).add_(self.epsilon).rsqrt_()
        return (wide * scale).mul_(weight.float()).to(x.dtype)


class CpuRMSNormBuilder(RMSNormBuilder):
    @staticmethod
    def build(hidden_size: int, eps: float = 1e-6) -> CpuRMSNormImpl:
        return CpuRMSNormImpl(hidden_size, eps)


FAMILY = OperatorFamily(builders={"RMSNorm": CpuRMSNormBuilder})
