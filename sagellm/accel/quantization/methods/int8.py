"""INT8: weights and inputs of 8 bits, rounded to the nearest, in the layout of LMDeploy's `smooth_quant` (w8a8)."""

from typing import Any

import torch
from torch import nn

from sagellm.accel.quantization.base import BaseQuantizer
from sagellm.accel.quantization.layers import Site
from sagellm.accel.quantization.profile import QuantizationProfile, Quantized

BITS, TOP = 8, 127


class Int8(BaseQuantizer):
    """8-bit weights with a scale for each output; inputs are rounded to 8 bits as they come.

    Args:
        head_bits: as `BaseQuantizer`.
    """

    name = "int8"

    def profile(self) -> QuantizationProfile:
        return QuantizationProfile(
            method=self.name, weight_bits=BITS, group_size=0, activation_bits=BITS, symmetric=True, head_bits=self.head_bits
        )

    def settings(self) -> dict[str, Any]:
        return {"quant_method": "smooth_quant", "quant_dtype": "int8"}

    def quantize_layer(self, layer: nn.Module, sites: list[Site]) -> dict[str, Quantized]:
        found = {}
        for site in sites:
            for name, linear in site.linears.items():
                scale = linear.weight.abs().amax(1, keepdim=True).clamp(min=1e-6) / TOP
                values = torch.round(linear.weight / scale).clamp(-TOP, TOP)
                found[name] = Quantized({"weight": values.to(torch.int8), "scale": scale}, values * scale)
        return found
