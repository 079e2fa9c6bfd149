"""Linear layers. The weight is reordered once into the layout that the native kernels read."""

import numpy as np
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

HEAD_BLOCK = 64  # inputs that share a scale in an output layer that is rounded to 8 bits


class CpuLinearImpl(LinearImpl):
    """y = x W^T + b.

    Attributes:
        is_quantized: the weight comes from `levels`.
        in_8_bits: inputs are rounded to 8 bits where the processor multiplies these.
    """

    packed: PackedWeight | None = None
    is_quantized = in_8_bits = False

    def levels(self, module: nn.Module, holds: str = "") -> Levels:
        """Return the weights of LMDeploy's module.

        Args:
            holds: method of the weights, where the module can hold those of several.
        """
        raise NotImplementedError

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
    source = _Source(model, levels)
    for name, module in list(model.named_modules()):
        _fuse_gate(name, module, source)
    packed: dict[int, PackedWeight] = {}  # by address of the original
    for name, module in model.named_modules():
        if _can_pack(module) and module.impl.packed is None:
            known = source.levels(name, module)
            if module.impl.is_quantized:
                module.impl.packed = PackedWeight(source.shape(module), module.bias, known, module.impl.in_8_bits)
                _free(module)
            else:
                weight = module.weight.detach()
                ready = PackedWeight(weight, module.bias, known, source.in_8_bits(name))
                module.impl.packed = packed[weight.data_ptr()] = ready
                module.weight = nn.Parameter(module.impl.packed.data, requires_grad=False)
    for place, parent in list(model.named_modules()):
        for name, child in parent.named_children():
            if type(child) is not nn.Embedding:
                continue
            shared, known = packed.get(child.weight.data_ptr()), _levels_of(levels, f"{place}.{name}", child)
            if shared is not None or known is not None:
                setattr(parent, name, PackedEmbedding(shared or PackedWeight(child.weight.detach(), levels=known)))


def _free(module: nn.Module) -> None:
    """Drop the quantized tensors of a module that has been packed."""
    for name, tensor in list(module.named_parameters(recurse=False)):
        if name != "bias":
            setattr(module, name, nn.Parameter(tensor.new_empty(0), requires_grad=False))


class _Source:
    """Where the levels of a model's weights come from: a GGUF file, its own quantized layers, or nowhere.

    Args:
        model: of LMDeploy, loaded. `sage_orders` are the orders of inputs that `CpuDevice.weights` found.
    """

    def __init__(self, model: nn.Module, levels: GGUFLevels | None) -> None:
        self._file = levels
        config = getattr(getattr(model, "config", None), "quantization_config", None) or {}
        self._holds, self._head_bits = config.get("holds", "awq"), config.get("head_bits", 16)
        self._orders = getattr(model, "sage_orders", {})
        floats = (tensor.dtype for tensor in model.parameters() if tensor.dtype in (torch.float32, torch.bfloat16))
        self._dtype = next(floats, torch.float32)
        impls = [module.impl for module in model.modules() if isinstance(getattr(module, "impl", None), CpuLinearImpl)]
        self._rounds = self._holds != "fp8" and any(impl.in_8_bits for impl in impls)

    def shape(self, module: nn.Module) -> torch.Tensor:
        """Return a tensor without numbers of the shape that a quantized weight stands for."""
        return torch.empty(module.out_features, module.in_features, dtype=self._dtype, device="meta")

    def in_8_bits(self, name: str) -> bool:
        """Return whether the inputs of a plain weight are rounded: an output layer is computed as the layers before it."""
        return self._rounds and self._is_rounded_head(name)

    def levels(self, name: str, module: nn.Module) -> Levels | None:
        """Return the levels of LMDeploy's module `name`, or None if its weights are to be packed as they are loaded."""
        if module.impl.is_quantized:
            return module.impl.levels(module, self._holds)._replace(order=self._order(name, module))
        if self._is_rounded_head(name):
            return Levels.rounded(module.weight.detach().float().numpy(), HEAD_BLOCK)
        return _levels_of(self._file, name, module)

    def _is_rounded_head(self, name: str) -> bool:
        return self._head_bits == 8 and name.rpartition(".")[2] == "lm_head"

    def _order(self, name: str, module: nn.Module) -> np.ndarray | None:
        place, _, last = name.rpartition(".")
        names = [name, *(f"{place}.{part}" for part in JOINED.get(last, ()))]
        found = [self._orders[each] for each in names if each in self._orders]
        if not found:
            return None
        if len(found) not in (1, len(names) - 1) or any(not torch.equal(each, found[0]) for each in found):
            raise EngineError(f"the parts of {name} have different orders of activation, and LMDeploy joins them.")
        if module.is_tp and not module.colwise:
            raise EngineError(f"{name} has an order of activation, which cannot be split over ranks; use tensor_parallel 1.")
        return found[0].numpy()


# Matrices of transformers that LMDeploy joins, by the last part of its name. The output layer may be the embedding.
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
TIED = {"lm_head": "model.embed_tokens"}


def _levels_of(levels: GGUFLevels | None, name: str, module: nn.Module) -> Levels | None:
    """Levels of LMDeploy's module `name` in this worker, or None if its weights are to be packed as they are loaded."""
    if levels is None:
        return None
    place, _, last = name.rpartition(".")
    names = [name if name in levels else TIED.get(name, name)]
    if names[0] not in levels:
        names = [f"{place}.{part}" for part in JOINED.get(last, ())]
    if not names or not all(each in levels for each in names):
        return None
    found = levels.of(names)
    if found is not None and getattr(module, "is_tp", False):
        found = _own_part(found, module)
    if found is not None and found.values.shape != tuple(module.weight.shape):
        raise EngineError(
            f"{name} is {tuple(module.weight.shape)} here and {found.values.shape} in the GGUF file; use weights auto."
        )
    return found


def _own_part(levels: Levels, module: LinearBase) -> Levels:
    """Return this worker's part of a matrix. LMDeploy's own loader of weights says which one that is, from numbers of rows."""
    outputs, inputs = levels.values.shape
    if not module.colwise:
        columns = nn.Parameter(torch.empty(1, module.in_features, dtype=torch.int64), requires_grad=False)
        module.weight_loader(columns, torch.arange(inputs)[None])
        return levels.of_inputs(int(columns[0, 0]), module.in_features)
    rows = nn.Parameter(torch.empty(module.out_features, 1, dtype=torch.int64), requires_grad=False)
    numbers = torch.arange(outputs)[:, None]
    if hasattr(module, "weight_spliter"):  # several matrices in one
        for part, each in zip(module.out_names_map, module.weight_spliter(numbers), strict=True):
            module.weight_loader(rows, each, part)
    else:
        module.weight_loader(rows, numbers)
    return levels.in_order(lambda part: part[rows[:, 0].numpy()])


def _can_pack(module: nn.Module) -> bool:
    impl = getattr(module, "impl", None)
    if not isinstance(module, LinearBase) or not isinstance(impl, CpuLinearImpl):
        return False
    return impl.is_quantized or can_pack(module.weight)


def _fuse_gate(name: str, block: nn.Module, source: _Source) -> None:
    """Turn `act_fn(gate_up_proj(x))` of a feed-forward block, where it is exactly that, into one layer."""
    merged, activation = getattr(block, "gate_up_proj", None), getattr(block, "act_fn", None)
    kind = kind_of(activation)
    if not kind or not _can_pack(merged) or merged.bias is not None or len(merged.lora_adapters):
        return
    known = source.levels(f"{name}.gate_up_proj", merged)
    weight = source.shape(merged) if merged.impl.is_quantized else merged.weight.detach()
    block.gate_up_proj = PackedGate(weight, kind, known, merged.impl.in_8_bits)
    block.act_fn = nn.Identity()


FAMILY = OperatorFamily(builders={"Linear": CpuLinearBuilder}, prepare=pack_model)
