"""Linear layers. The weight is reordered once into the layout that the native kernels read."""

import torch
import torch.nn.functional as F
from lmdeploy.pytorch import distributed as dist
from lmdeploy.pytorch.backends.linear import LinearBuilder, LinearImpl
from lmdeploy.pytorch.nn.linear.base import LinearBase
from torch import nn

from sagellm.core.errors import EngineError
from sagellm.engines.lmdeploy.cpu.operators.activation import kind_of
from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily
from sagellm.engines.lmdeploy.cpu.packed import PackedEmbedding, PackedGate, PackedWeight, can_pack
from sagellm.models.gguf_levels import GGUFLevels
from sagellm.models.levels import Levels


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


def pack_model(model: nn.Module, levels: GGUFLevels | None = None) -> None:
    """Fuse gated layers, then pack the weights of all other linear layers. In place, after loading.

    The packed copy takes the place of the original, in a tied embedding too.

    Args:
        levels: the file of the weights; what is quantized there is packed from it.
    """
    for name, module in list(model.named_modules()):
        _fuse_gate(name, module, levels)
    packed: dict[int, PackedWeight] = {}  # by address of the original
    for name, module in model.named_modules():
        if _is_plain(module) and module.impl.packed is None:
            weight, known = module.weight.detach(), _levels_of(levels, name, module.weight)
            module.impl.packed = packed[weight.data_ptr()] = PackedWeight(weight, module.bias, known)
            module.weight = nn.Parameter(module.impl.packed.data, requires_grad=False)
    for place, parent in list(model.named_modules()):
        for name, child in parent.named_children():
            if type(child) is not nn.Embedding:
                continue
            shared, known = packed.get(child.weight.data_ptr()), _levels_of(levels, f"{place}.{name}", child.weight)
            if shared is not None or known is not None:
                setattr(parent, name, PackedEmbedding(shared or PackedWeight(child.weight.detach(), levels=known)))


# Matrices of transformers that LMDeploy joins, by the last part of its name. The output layer may be the embedding.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
TIED = {"lm_head": "model.embed_tokens"}


def _levels_of(levels: GGUFLevels | None, name: str, weight: torch.Tensor) -> Levels | None:
    """Levels of LMDeploy's module `name`, or None if its weights are to be packed as they are loaded."""
    if levels is None:
        return None
    place, _, last = name.rpartition(".")
    names = [name if name in levels else TIED.get(name, name)]
    if names[0] not in levels:
        names = [f"{place}.{part}" for part in JOINED.get(last, ())]
    if not names or not all(each in levels for each in names):
        return None
    found = levels.of(names)
    if found is not None and found.values.shape != tuple(weight.shape):
        raise EngineError(
            f"{name} is {tuple(weight.shape)} here and {found.values.shape} in the GGUF file; packed weights need a whole "
            "model in each worker."
        )
    return found


def _is_plain(module: nn.Module) -> bool:
    impl = getattr(module, "impl", None)
    return isinstance(module, LinearBase) and isinstance(impl, CpuLinearImpl) and can_pack(module.weight)


def _fuse_gate(name: str, block: nn.Module, levels: GGUFLevels | None) -> None:
    """Turn `act_fn(gate_up_proj(x))` of a feed-forward block, where it is exactly that, into one layer."""
    merged, activation = getattr(block, "gate_up_proj", None), getattr(block, "act_fn", None)
    kind = kind_of(activation)
    if not kind or not _is_plain(merged) or merged.bias is not None or len(merged.lora_adapters):
        return
    known = _levels_of(levels, f"{name}.gate_up_proj", merged.weight)
    block.gate_up_proj = PackedGate(merged.weight.detach(), kind, known)
    block.act_fn = nn.Identity()


FAMILY = OperatorFamily(builders={"Linear": CpuLinearBuilder}, prepare=pack_model)
