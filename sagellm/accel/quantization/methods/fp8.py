"""FP8: floats of 8 bits (e4m3) with a scale for each block of 128 x 128, as DeepSeek-V3's checkpoints have them."""

from typing import Any

import torch
from lmdeploy.lite.quantization.weight.quant_utils import quant_blocked_fp8
from torch import nn

from sagellm.accel.quantization.base import BaseQuantizer
from sagellm.accel.quantization.input_order import InputOrder
from sagellm.accel.quantization.layers import Site
from sagellm.accel.quantization.profile import QuantizationProfile, Quantized
from sagellm.core.errors import QuantizationError
from sagellm.models.quantized import FP8_BLOCK

DTYPE = torch.float8_e4m3fn
TOP = torch.finfo(DTYPE).max


class Fp8(BaseQuantizer):
    """8-bit floats, in blocks or with a scale for each output. An input's error is made up for by others, as in GPTQ.

    Args:
        per_channel: a scale for each output, in the layout of LMDeploy's `smooth_quant`, in place of blocks.
        head_bits: as `BaseQuantizer`.
    """

    name = "fp8"
    needs_calibration = True

    def __init__(self, per_channel: bool = False, head_bits: int = 8) -> None:
        super().__init__(head_bits)
        if not isinstance(per_channel, bool):
            raise QuantizationError(f"per_channel is {per_channel!r}; allowed are true and false.")
        self.per_channel = per_channel

    def profile(self) -> QuantizationProfile:
        # LMDeploy's kernels round inputs to 8 bits; the CPU device multiplies them as they are.
        return QuantizationProfile(
            method=self.name, weight_bits=8, group_size=0 if self.per_channel else FP8_BLOCK, symmetric=True, rounding="gptq",
            head_bits=self.head_bits,
        )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        if self.per_channel:
            return {"quant_method": "smooth_quant", "quant_dtype": "float8_e4m3fn"}
        return {
            "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK], "activation_scheme": "dynamic"
        }  # fmt: skip

    def quantize_layer(self, layer: nn.Module, sites: list[Site]) -> dict[str, Quantized]:
        found = {}
        for site in sites:
            order = InputOrder(site.gram)
            for name, linear in site.linears.items():
                outputs, inputs = linear.weight.shape
                if self.per_channel:
                    scale = linear.weight.abs().amax(1, keepdim=True).clamp(min=1e-6) / TOP
                    of_weight, part = scale.expand(-1, inputs), "scale"
                else:
                    _, scale = quant_blocked_fp8(linear.weight, DTYPE, FP8_BLOCK)
                    of_weight, part = scale.repeat_interleave(FP8_BLOCK, 0)[:outputs], "weight_scale_inv"
                    of_weight = of_weight.repeat_interleave(FP8_BLOCK, 1)[:, :inputs]

                def nearest(at: int, column: torch.Tensor, of_weight: torch.Tensor = of_weight) -> torch.Tensor:
                    scale = of_weight[:, at : at + 1]
                    return (column / scale).clamp(-TOP, TOP).to(DTYPE).float() * scale

                rounded = order.rounded(linear.weight, nearest)
                values = (rounded / of_weight).to(DTYPE)
                found[name] = Quantized({"weight": values, part: scale}, values.float() * of_weight)
        return found
