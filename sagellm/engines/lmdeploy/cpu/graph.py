"""The model runner of the CPU device: eager, over a model whose weights were put in order once."""

import torch
from lmdeploy.pytorch.backends.graph_runner import GraphRunner
from lmdeploy.pytorch.nn.linear.base import LinearBase
from torch import nn

from sagellm.engines.lmdeploy.cpu.activation import CpuSiluAndMulImpl
from sagellm.engines.lmdeploy.cpu.linear import CpuLinearImpl, GatedLinear, can_pack, pack


class EagerRunner(GraphRunner):
    """Runs the model as it is. There is no graph to capture, hence one warm-up batch instead of one a power of two."""

    def __init__(self, model: nn.Module, *args, **kwargs) -> None:
        optimize(model)
        super().__init__(model, *args, **kwargs)

    def get_capture_batch_sizes(self) -> list[int]:
        return [1]


def optimize(model: nn.Module) -> None:
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
