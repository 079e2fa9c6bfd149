"""Linear layers. In bfloat16 the weight is reordered once into the layout that oneDNN's kernels read."""

import torch
import torch.nn.functional as F
from lmdeploy.pytorch import distributed as dist
from lmdeploy.pytorch.backends.linear import LinearBuilder, LinearImpl


class CpuLinearImpl(LinearImpl):
    """y = x W^T + b.

    With a plain row-major weight oneDNN reorders it in every call, or falls back to a kernel that reads it at less than
    half of the memory bandwidth; a decode step is nothing but such reads.
    """

    def update_weights(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        """Called once after loading. `weight`: [out_features, in_features]."""
        if weight.dtype == torch.bfloat16 and not weight.is_mkldnn and torch.backends.mkldnn.is_available():
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        return weight, bias

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        all_reduce: bool = False,
        group: object = None,
        rank: int = 0,
        scatter_size: list[int] | None = None,
    ) -> torch.Tensor:
        """`x`: [..., in_features]; returns [..., out_features], summed over the group with `all_reduce`."""
        if weight.is_mkldnn:
            out = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        else:
            out = F.linear(x, weight, bias)
        if all_reduce:
            if scatter_size is not None:
                return dist.reduce_scatter_by_tp_sizes(out, rank, scatter_size, group=group)
            dist.all_reduce(out, group=group)
        return out


class CpuLinearBuilder(LinearBuilder):
    @staticmethod
    def build(in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None):
        return CpuLinearImpl()
