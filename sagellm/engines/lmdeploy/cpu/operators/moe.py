"""Mixture of experts: each token goes through a few gated feed-forward blocks."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from lmdeploy.pytorch.backends.moe import FusedMoEBuilder, FusedMoEImpl
from torch import nn

from sagellm.core.errors import EngineError
from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily
from sagellm.engines.lmdeploy.cpu.packed import PackedGate, PackedWeight, can_pack
from sagellm.models.gguf_levels import GGUFLevels

Product = Callable[[torch.Tensor], torch.Tensor]  # [..., hidden] -> [..., size]


class CpuFusedMoEImpl(FusedMoEImpl):
    """Expert by expert, over packed weights once the model is loaded."""

    def __init__(self, renormalize: bool) -> None:
        self.renormalize = renormalize
        self.packed: list[tuple[Product, PackedWeight]] = []  # of each expert

    def pack(
        self, gate_up: "_Weights | nn.Module", down: "_Weights | nn.Module",
        act_func: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:  # fmt: skip
        """Pack the weights of all experts.

        Args:
            gate_up: its weight is [experts, 2 * size, hidden], gates first; its bias [experts, 2 * size] or None.
            down: the same, [experts, hidden, size] and [experts, hidden].
            act_func: from [..., 2 * size] to [..., size]; None is SiLU of the gates times the other half.
        """
        if act_func is not None:
            # gpt-oss compiles its function with torch when it is first called, which takes seconds and gains nothing here.
            act_func = getattr(act_func, "_impl", act_func)
        for expert, (one, other) in enumerate(zip(gate_up.weight.detach(), down.weight.detach(), strict=True)):
            biases = [None if part.bias is None else part.bias[expert] for part in (gate_up, down)]
            if act_func is None and biases[0] is None:
                first: Product = PackedGate(one, "silu")
            else:
                first = _Activated(PackedWeight(one, biases[0]), act_func or _silu_and_mul)
            self.packed.append((first, PackedWeight(other, biases[1])))

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        gate_up_weights: torch.Tensor,
        down_weights: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        expert_list: list[int] | None = None,
        act_func: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`hidden_states`: [tokens, hidden]; `topk_weights`, `topk_ids`: [tokens, k]. Returns [tokens, hidden]."""
        if not self.packed:
            self.pack(_Weights(gate_up_weights, gate_up_bias), _Weights(down_weights, down_bias), act_func)
        if self.renormalize:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            tokens, place = torch.where(topk_ids == expert)
            gate_up, down = self.packed[expert]
            result = down.multiply(gate_up(hidden_states[tokens]), wide=True)
            out.index_add_(0, tokens, result * topk_weights[tokens, place, None].float())
        return out.to(hidden_states.dtype)


class _Weights(NamedTuple):
    """Weights and biases of all experts, as LMDeploy's module has them."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class _Activated(NamedTuple):
    """A product, and a function of its result."""

    packed: PackedWeight
    act_func: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.act_func(self.packed.multiply(x))


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return nn.functional.silu(gate) * up


class CpuFusedMoEBuilder(FusedMoEBuilder):
    @staticmethod
    def build(top_k: int, num_experts: int, renormalize: bool = False, ep_size: int = 1, **kwargs) -> CpuFusedMoEImpl:
        if ep_size > 1:
            raise EngineError(f"expert parallelism {ep_size} does not run on the CPU device; leave it at 1.")
        return CpuFusedMoEImpl(renormalize)


def pack_experts(model: nn.Module, levels: GGUFLevels | None = None) -> None:
    """Pack the weights of all experts in place of the originals, after loading. No GGUF file with experts is read."""
    for module in model.modules():
        impl = getattr(module, "impl", None)
        if isinstance(impl, CpuFusedMoEImpl) and not impl.packed and can_pack(module.down.weight[0]):
            impl.pack(module.gate_up, module.down, module.act_func)
            for weights in (module.gate_up, module.down):
                weights.weight = nn.Parameter(torch.empty(0, dtype=weights.weight.dtype), requires_grad=False)


FAMILY = OperatorFamily(builders={"FusedMoE": CpuFusedMoEBuilder}, prepare=pack_experts)
