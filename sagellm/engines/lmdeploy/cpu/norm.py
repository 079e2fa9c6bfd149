"""Root-mean-square norm (Zhang and Sennrich, 2019) with the residual added first."""

import torch
import torch.nn.functional as F
from lmdeploy.pytorch.backends.norm import RMSNormBuilder, RMSNormImpl


class CpuRMSNormImpl(RMSNormImpl):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        self._shape = (hidden_size,)
        self._eps = eps

    def forward(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None):
        """`x`, `residual`: [..., hidden_size]. Returns the norm, and with a residual also the sum."""
        if residual is None:
            return F.rms_norm(x, self._shape, weight, self._eps)
        total = x + residual
        return F.rms_norm(total, self._shape, weight, self._eps), total


class CpuRMSNormBuilder(RMSNormBuilder):
    @staticmethod
    def build(hidden_size: int, eps: float = 1e-6) -> CpuRMSNormImpl:
        return CpuRMSNormImpl(hidden_size, eps)
