"""Linear layers. The weight is reordered once into the layout that the native kernels read."""

import torch
import torch.nn.functional as F
from lmdeploy.pytorch import distributed as dist
from lmdeploy.pytorch.backends.linear import LinearBuilder, LinearImpl
from lmdeploy.pytorch.nn.linear.base import LinearBase
from torch import nn

from sagellm.engines.lmdeploy.cpu.operators.activation import kind_of
from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily
from sagellm.engines.lmdeploy.cpu.packed import PackedEmbedding, PackedGate, PackedWeight, can_pack


class CpuLinearImpl(LinearImpl):
    """y = x W^T + b."""

    packed: PackedWeight | None = None

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
        out = F.linear(x, weight, bias) if self.packed is None else self.packed.multiply(x)
        if all_reduce:
            if scatter_size is not None:
                return dist.reduce_scatter_by_tp_sizes(out, rank, scatter_size, group=group)
            dist.all_reduce(out, group=group)
        return out


class CpuLinearBuilder(LinearBuilder):
    @staticmethod
    def build(in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | None = None):
        return CpuLinearImpl()


def pack_model(model: nn.Module) -> None:
    """Fuse gated layers, then pack the weights of all other linear layers. In place, after loading.

    The packed copy takes the place of the original, in a tied embedding too.
    """
    for module in list(model.modules()):
        _fuse_gate(module)
    packed: dict[int, PackedWeight] = {}  # by address of the original
    for module in model.modules():
        if _is_plain(module) and module.impl.packed is None:
            module.impl.packed = packed[module.weight.data_ptr()] = PackedWeight(module.weight.detach(), module.bias)
            module.weight = nn.Parameter(module.impl.packed.data, requires_grad=False)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Embedding and child.weight.data_ptr() in packed:
                setattr(parent, name, PackedEmbedding(packed[child.weight.data_ptr()]))


def _is_plain(module: nn.Module) -> bool:
    impl = getattr(module, "impl", None)
    return isinstance(module, LinearBase) and isinstance(impl, CpuLinearImpl) and can_pack(module.weight)


def _fuse_gate(block: nn.Module) -> None:
    """Turn `act_fn(gate_up_proj(x))` of a feed-forward block, where it is exactly that, into one layer."""
    merged, activation = getattr(block, "gate_up_proj", None), getattr(block, "act_fn", None)
    kind = kind_of(activation)
    if not kind or not _is_plain(merged) or merged.bias is not None or len(merged.lora_adapters):
        return
    block.gate_up_proj = PackedGate(merged.weight.detach(), kind)
    block.act_fn = nn.Identity()


FAMILY = OperatorFamily(builders={"Linear": CpuLinearBuilder}, prepare=pack_model)
