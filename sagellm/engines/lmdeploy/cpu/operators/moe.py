"""Mixture of experts: each token goes through a few gated feed-forward blocks."""

from collections.abc import Callable

import torch
from lmdeploy.pytorch.backends.moe import FusedMoEBuilder, FusedMoEImpl
from torch import nn

from sagellm.core.errors import EngineError
from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily
from sagellm.engines.lmdeploy.cpu.packed import PackedGate, PackedWeight, can_pack


class CpuFusedMoEImpl(FusedMoEImpl):
    """Expert by expert, over packed weights once the model is loaded."""

    def __init__(self, renormalize: bool) -> None:
        self._renormalize = renormalize
        self.packed: list[tuple[PackedGate, PackedWeight]] = []  # of each expert

    def pack(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """`gate_up`: [experts, 2 * size, hidden], gates first; `down`: [experts, hidden, size]."""
        self.packed = [(PackedGate(one, "silu"), PackedWeight(other)) for one, other in zip(gate_up, down, strict=True)]

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
        """`hidden_states`: [tokens, hidden]; `topk_weights`, `topk_ids`: [tokens, k]. Returns [tokens, hidden].

        Raises:
            EngineError: experts with biases, or with another activation than SiLU.
        """
        if gate_up_bias is not None or act_func is not None:
            raise EngineError("experts with biases or another activation than SiLU do not run on the CPU device.")
        if self._renormalize:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        out = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            tokens, place = torch.where(topk_ids == expert)
            gate_up, down = self.packed[expert]
            result = down.multiply(gate_up(hidden_states[tokens]), wide=True)
            out.index_add_(0, tokens, result * topk_weights[tokens, place, None].float())
        return out.to(hidden_states.dtype)


class CpuFusedMoEBuilder(FusedMoEBuilder):
    @staticmethod
    def build(top_k: int, num_experts: int, renormalize: bool = False, ep_size: int = 1, **kwargs) -> CpuFusedMoEImpl:
        if ep_size > 1:
            raise EngineError(f"expert parallelism {ep_size} does not run on the CPU device; leave it at 1.")
        return CpuFusedMoEImpl(renormalize)


def pack_experts(model: nn.Module) -> None:
    """Pack the weights of all experts in place of the originals, after loading."""
    for module in model.modules():
        impl = getattr(module, "impl", None)
        if isinstance(impl, CpuFusedMoEImpl) and not impl.packed and can_pack(module.down.weight[0]):
            impl.pack(module.gate_up.weight.detach(), module.down.weight.detach())
            for weights in (module.gate_up, module.down):
                weights.weight = nn.Parameter(torch.empty(0, dtype=weights.weight.dtype), requires_grad=False)


FAMILY = OperatorFamily(builders={"FusedMoE": CpuFusedMoEBuilder}, prepare=pack_experts)
