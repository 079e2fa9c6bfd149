"""Linear layers. The weight is reordered once into the layout that oneDNN's kernels read."""

import torch
import torch.nn.functional as F
from lmdeploy.pytorch import distributed as dist
from lmdeploy.pytorch.backends.linear import LinearBuilder, LinearImpl
from lmdeploy.pytorch.nn.linear.base import LinearBase
from torch import nn

from sagellm.engines.lmdeploy.cpu.operators.activation import CpuSiluAndMulImpl
from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily

# Below so many elements oneDNN's call, of 20 us and more, takes longer than the product of a few float32 rows; from 16 rows
# on, and with more elements, the reordered weight wins.
SMALL = 1 << 17


def can_pack(weight: torch.Tensor) -> bool:
    """True for weights that are worth reordering."""
    if weight.is_mkldnn or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.bfloat16 or (weight.dtype == torch.float32 and weight.numel() > SMALL)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Reorder a weight [out_features, in_features].

    With a row-major weight oneDNN reorders it in every call, or falls back to a kernel that reads it at half of the
    memory's bandwidth; a decode step is little but such reads. In float32 the kernels for row-major weights take 1.7 times as
    long for one row, and 2.5 times for five.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x`: [..., in_features]; `weight` as `pack` returned it."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class CpuLinearImpl(LinearImpl):
    """y = x W^T + b."""

    def update_weights(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        """Weights stay as they are until the whole model is loaded; `pack_model` packs them then."""
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
        out = packed_linear(x, weight, bias) if weight.is_mkldnn else F.linear(x, weight, bias)
        if all_reduce:
            if scatter_size is not None:
                return dist.reduce_scatter_by_tp_sizes(out, rank, scatter_size, group=group)
            dist.all_reduce(out, group=group)
        return out


class GatedLinear(nn.Module):
    """silu(x Wg^T) * (x Wu^T) in two passes over memory: oneDNN applies both element-wise steps as it writes."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        """`gate`, `up`: [size, in_features], row-major."""
        super().__init__()
        self.gate = nn.Parameter(pack(gate), requires_grad=False)
        self.up = nn.Parameter(pack(up), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [..., in_features]; returns [..., size]."""
        gate = torch.ops.mkldnn._linear_pointwise(x, self.gate, None, "swish", [1.0], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, gate, self.up, None, "mul")


class CpuLinearBuilder(LinearBuilder):
    @staticmethod
    def build(in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None):
        return CpuLinearImpl()


def pack_model(model: nn.Module) -> None:
    """Fuse gated layers, then pack the weights of all other linear layers. In place, after loading."""
    for module in list(model.modules()):
        _fuse_gate(module)
    for module in model.modules():
        if isinstance(module, LinearBase) and isinstance(getattr(module, "impl", None), CpuLinearImpl):
            if can_pack(module.weight):
                module.weight = nn.Parameter(pack(module.weight), requires_grad=False)


def _fuse_gate(block: nn.Module) -> None:
    """Turn `act_fn(gate_up_proj(x))` of a feed-forward block, where it is exactly that, into one layer."""
    merged, activation = getattr(block, "gate_up_proj", None), getattr(block, "act_fn", None)
    if not isinstance(merged, LinearBase) or not isinstance(getattr(merged, "impl", None), CpuLinearImpl):
        return
    if not isinstance(getattr(activation, "impl", None), CpuSiluAndMulImpl):
        return
    if merged.bias is not None or len(merged.lora_adapters) or not can_pack(merged.weight):
        return
    if merged.weight.dtype != torch.bfloat16:  # in float32 a second product costs more than what is saved
        return
    gate, up = merged.weight.detach().chunk(2, 0)
    block.gate_up_proj = GatedLinear(gate, up)
    block.act_fn = nn.Identity()


FAMILY = OperatorFamily(builders={"Linear": CpuLinearBuilder}, prepare=pack_model)
