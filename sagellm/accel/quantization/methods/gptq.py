"""GPTQ: whole numbers, each input's error made up for by the inputs after it (`input_order.py`).

Groups stay where they are whatever the order is, so that the layout needs no `g_idx`.
"""

from typing import Any

import torch
from torch import nn

from sagellm.accel.quantization.base import BaseQuantizer
from sagellm.accel.quantization.groups import Grid, awq_tensors, choose_grid
from sagellm.accel.quantization.input_order import InputOrder
from sagellm.accel.quantization.layers import Site
from sagellm.accel.quantization.profile import QuantizationProfile, Quantized
from sagellm.accel.quantization.sizes import allow_group, check_group
from sagellm.core.errors import QuantizationError
from sagellm.models.quantized import pack_gptq


class Gptq(BaseQuantizer):
    """4 or 8 bits by GPTQ. With 4 bits the folder has AutoAWQ's layout, which LMDeploy loads, else AutoGPTQ's.

    Args:
        bits: 4 or 8.
        group_size: inputs that share a scale: 32, 64 or 128.
        head_bits: as `BaseQuantizer`.
    """

    name = "gptq"
    needs_calibration = has_whole_groups = True

    def __init__(self, bits: int = 4, group_size: int = 64, head_bits: int = 8) -> None:
        super().__init__(head_bits)
        if bits not in (4, 8):
            raise QuantizationError(f"bits is {bits}; GPTQ takes 4 or 8.")
        self.bits, self.group_size = bits, allow_group("GPTQ", group_size)

    def profile(self) -> QuantizationProfile:
        return QuantizationProfile(
            method=self.name, weight_bits=self.bits, group_size=self.group_size, head_bits=self.head_bits, rounding="gptq"
        )

    def settings(self) -> dict[str, Any]:
        if self.bits == 4:
            return {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": self.group_size, "zero_point": True}
        return {
            "quant_method": "gptq", "bits": self.bits, "group_size": self.group_size, "desc_act": False, "sym": False,
            "checkpoint_format": "gptq_v2",
        }  # fmt: skip

    def quantize_layer(self, layer: nn.Module, sites: list[Site]) -> dict[str, Quantized]:
        found = {}
        for site in sites:
            order = InputOrder(site.gram)
            for name, linear in site.linears.items():
                check_group(name, linear.in_features, self.group_size)
                grid = choose_grid(linear.weight, self.bits, self.group_size, gram=site.gram)
                levels = order.levels(linear.weight, grid)
                tensors = awq_tensors(levels, grid) if self.bits == 4 else _gptq_tensors(levels, grid)
                found[name] = Quantized(tensors, grid.values(levels))
        return found


def _gptq_tensors(levels: torch.Tensor, grid: Grid) -> dict[str, torch.Tensor]:
    inputs, size = levels.shape[1], levels.shape[1] // grid.scales.shape[1]
    return {
        "qweight": pack_gptq(levels.T, grid.bits, 0),
        "qzeros": pack_gptq(grid.zeros.T, grid.bits, 1),
        "scales": grid.scales.T.half().contiguous(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // size,
    }
