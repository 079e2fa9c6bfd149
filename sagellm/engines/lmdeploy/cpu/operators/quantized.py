"""Linear layers whose weights are quantized: AWQ (and GPTQ in its layout), INT8 and FP8. Their levels stay as they are."""

from typing import Any

import numpy as np
import torch
from lmdeploy.pytorch.backends.awq_modules import LinearW4A16Builder
from lmdeploy.pytorch.backends.blockedf8_modules import LinearBlockedF8Builder
from lmdeploy.pytorch.backends.qmodules import LinearW8A8Builder, RMSNormW8A8Builder
from torch import nn

from sagellm.core.errors import EngineError
from sagellm.engines.lmdeploy.cpu.operators.base import OperatorFamily
from sagellm.engines.lmdeploy.cpu.operators.linear import CpuLinearImpl
from sagellm.engines.lmdeploy.cpu.operators.norm import CpuRMSNormImpl
from sagellm.models.levels import FLOAT8, FLOAT8_SHIFT, LEVELS4, LEVELS8, Levels, whole_block
from sagellm.models.quantized import FP8_BLOCK, unpack_awq

MAX_BLOCK = 64  # inputs that are rounded with one scale; 256 double the loss of SmolLM2, and save a tenth of a prompt's time


class _QuantizedImpl(CpuLinearImpl):
    """y = x W^T + b over quantized weights, which are packed once the whole model is loaded."""

    is_quantized = True

    def update_weights(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Weights stay as they are until then."""
        return tensors

    def forward(
        self, x: torch.Tensor, *arguments: Any, group: object = None, rank: int = 0, scatter_size: list[int] | None = None
    ) -> torch.Tensor:
        """`x`: [..., in_features]; returns [..., out_features].

        Args:
            arguments: tensors of LMDeploy's module, which are packed by now, and whether to add up over the group.
        """
        return super().forward(x, torch.empty(0), None, bool(arguments[-1]), group, rank, scatter_size)


class CpuAwqImpl(_QuantizedImpl):
    """4 bits in AutoAWQ's layout, or 8 bits of another method (`sagellm.models.quantized.container_of`).

    Inputs are rounded to 8 bits, as llama.cpp does: on SmolLM2 that moves answers a twentieth as far as 4-bit weights do.
    """

    in_8_bits = True

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def levels(self, module: nn.Module, holds: str = "awq") -> Levels:
        values = unpack_awq(module.qweight.detach(), self.bits).T.contiguous().numpy()
        scales = module.scales.detach().T.contiguous()  # [outputs, groups]
        zeros = unpack_awq(module.qzeros.detach(), self.bits).T.float()
        if holds == "fp8":
            form, offsets = FLOAT8, torch.zeros_like(scales)
        elif self.bits == 4:
            form, offsets = LEVELS4, (-zeros * scales.float()).half()
        else:  # 0 to 255 become -128 to 127
            form, offsets, values = LEVELS8, ((128 - zeros) * scales.float()).half(), values - np.uint8(128)
        return _in_blocks(Levels(values.view(np.int8), scales.numpy(), offsets.numpy(), form))


class CpuW8A8Impl(_QuantizedImpl):
    """8 bits with a scale for each output, as LMDeploy's `smooth_quant`. Inputs are rounded to 8 bits block by block of a row
    (LMDeploy: with one scale for the row)."""

    def __init__(self, in_8_bits: bool) -> None:
        self.in_8_bits = in_8_bits

    def levels(self, module: nn.Module, holds: str = "") -> Levels:
        weight, scale = module.weight.detach(), module.scale.detach()
        inputs = weight.shape[1]
        # Inputs of floats are not rounded, so their blocks may be large; each one costs an addition to the result.
        groups = _num_blocks(inputs, MAX_BLOCK if weight.dtype == torch.int8 else inputs)
        if weight.dtype == torch.int8:
            form, values = LEVELS8, weight.numpy()
        else:
            form, values, scale = FLOAT8, weight.view(torch.int8).numpy(), scale * 2.0**FLOAT8_SHIFT
        scales = scale.half().expand(-1, groups).contiguous().numpy()
        return Levels(values, scales, np.zeros_like(scales), form)


class CpuBlockedF8Impl(_QuantizedImpl):
    """Floats of 8 bits (e4m3) with a scale for each block of 128 x 128, as DeepSeek-V3."""

    def levels(self, module: nn.Module, holds: str = "") -> Levels:
        weight = module.weight.detach()
        outputs = weight.shape[0]
        scales = module.weight_scale_inv.detach() * 2.0**FLOAT8_SHIFT
        scales = scales.repeat_interleave(FP8_BLOCK, 0)[:outputs].half().numpy()
        return _in_blocks(Levels(weight.view(torch.int8).numpy(), scales, np.zeros_like(scales), FLOAT8))


def _num_blocks(inputs: int, largest: int) -> int:
    block = whole_block(inputs, largest)
    if block is None:
        raise EngineError(f"a quantized layer has {inputs} inputs; the CPU device takes multiples of 16.")
    return inputs // block


def _in_blocks(levels: Levels) -> Levels:
    """Cut groups of scales into blocks that the native code has."""
    found = levels.in_blocks()
    if found is None:
        raise EngineError(f"a quantized layer has groups of {levels.block} inputs; the CPU device takes multiples of 16.")
    return found


class CpuAwqBuilder(LinearW4A16Builder):
    @staticmethod
    def build(in_features: int, out_features: int, w_bit: int, group_size: int, bias: bool = False, dtype: Any = None):
        return CpuAwqImpl(w_bit)


class CpuW8A8Builder(LinearW8A8Builder):
    @staticmethod
    def build(in_features: int, out_features: int, bias: bool = True, dtype: Any = None, quant_dtype: Any = torch.int8):
        if quant_dtype not in (torch.int8, torch.float8_e4m3fn):
            raise EngineError(f"{quant_dtype} weights do not run on the CPU device; use int8 or float8_e4m3fn.")
        return CpuW8A8Impl(quant_dtype == torch.int8)


class CpuBlockedF8Builder(LinearBlockedF8Builder):
    @staticmethod
    def build(in_features: int, out_features: int, block_size: int = FP8_BLOCK, bias: bool = True, dtype: Any = None):
        return CpuBlockedF8Impl()


class CpuRMSNormW8A8Builder(RMSNormW8A8Builder):
    @staticmethod
    def build(hidden_size: int, eps: float = 1e-6, quant_dtype: Any = torch.int8):
        """The norm as always: the linears round their inputs themselves."""
        return CpuRMSNormImpl(hidden_size, eps)


FAMILY = OperatorFamily(
    builders={
        "LinearW4A16": CpuAwqBuilder,
        "LinearW8A8": CpuW8A8Builder,
        "LinearBlockedF8": CpuBlockedF8Builder,
        "RMSNormW8A8": CpuRMSNormW8A8Builder,
    }
)
