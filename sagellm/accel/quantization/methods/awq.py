"""AWQ: 4 bits, with the inputs that matter most scaled up in the weights before they are rounded.

Lin et al., "AWQ: Activation-aware Weight Quantization" (arXiv 2306.00978). The paper rounds to the nearest level, and says that
GPTQ's rounding goes with its scales. LMDeploy's `lite` has the method too, without the scales of grouped value heads and
without clipping, and reads its texts from a hub.
"""

from typing import Any

import torch
from torch import nn

from sagellm.accel.quantization.base import BaseQuantizer
from sagellm.accel.quantization.groups import awq_tensors, choose_grid, error_of
from sagellm.accel.quantization.input_order import InputOrder
from sagellm.accel.quantization.layers import Producer, Site, producer_of
from sagellm.accel.quantization.profile import QuantizationProfile, Quantized
from sagellm.accel.quantization.sizes import allow_group, check_group
from sagellm.core.errors import QuantizationError

BITS = 4
ROUNDINGS = ("gptq", "nearest")
RATIOS = [step / 20 for step in range(20)]  # of the inputs' size in a scale


class Awq(BaseQuantizer):
    """4 bits with activation-aware scales and clipping, in AutoAWQ's layout.

    Args:
        group_size: inputs that share a scale: 32, 64 or 128.
        head_bits: as `BaseQuantizer`.
        rounding: "gptq" makes up for each input's error in the inputs after it; "nearest" is the paper's.
    """

    name = "awq"
    needs_calibration = has_whole_groups = True

    def __init__(self, group_size: int = 64, head_bits: int = 8, rounding: str = "gptq") -> None:
        super().__init__(head_bits)
        self.group_size = allow_group("AWQ", group_size)
        if rounding not in ROUNDINGS:
            raise QuantizationError(f"rounding is {rounding!r}; AWQ takes {' or '.join(ROUNDINGS)}.")
        self.rounding = rounding

    def profile(self) -> QuantizationProfile:
        return QuantizationProfile(
            method=self.name, weight_bits=BITS, group_size=self.group_size, head_bits=self.head_bits, rounding=self.rounding
        )

    def settings(self) -> dict[str, Any]:
        return {"quant_method": "awq", "version": "gemm", "bits": BITS, "group_size": self.group_size, "zero_point": True}

    def quantize_layer(self, layer: nn.Module, sites: list[Site]) -> dict[str, Quantized]:
        for site in sites:
            for name, linear in site.linears.items():
                check_group(name, linear.in_features, self.group_size)
            producer = producer_of(layer, site)
            if producer is not None:
                scales = self._search(site, producer)
                producer.divide(scales)
                for linear in site.linears.values():
                    linear.weight.data *= scales
                site.rescale(scales)
        found = {}
        for site in sites:
            order = InputOrder(site.gram) if self.rounding == "gptq" else None
            for name, linear in site.linears.items():
                grid = choose_grid(linear.weight, BITS, self.group_size, gram=site.gram)
                levels = grid.levels(linear.weight) if order is None else order.levels(linear.weight, grid)
                found[name] = Quantized(awq_tensors(levels, grid), grid.values(levels))
        return found

    def _search(self, site: Site, producer: Producer) -> torch.Tensor:
        """Return the scales of inputs, [inputs], with the least error of the site's outputs."""
        joined = torch.cat([linear.weight for linear in site.linears.values()])
        groups = joined.abs().unflatten(1, (-1, self.group_size))
        sizes = (groups / groups.amax(2, keepdim=True).clamp(min=1e-8)).flatten(1).mean(0).clamp(min=1e-4)
        mean, sizes = producer.shared(site.mean).clamp(min=1e-8), producer.shared(sizes)
        best, least = torch.ones_like(mean), float("inf")
        for power in (0.0, 1.0):
            for ratio in RATIOS:
                scales = (mean**ratio / sizes ** ((1 - ratio) * power)).clamp(min=1e-4)
                scales = scales / (scales.max() * scales.min()).sqrt()
                scaled = joined * scales
                off = choose_grid(scaled, BITS, self.group_size).rounded(scaled) / scales - joined
                error = error_of(off, site.gram)
                if error < least:
                    best, least = scales, error
        return best
