"""SmoothQuant: as INT8, after large inputs have been scaled down and their weights up.

Xiao et al., "SmoothQuant" (arXiv 2211.10438).
"""

from torch import nn

from sagellm.accel.quantization.layers import Site, producer_of
from sagellm.accel.quantization.methods.int8 import Int8
from sagellm.accel.quantization.profile import Quantized
from sagellm.core.errors import QuantizationError


class SmoothQuant(Int8):
    """8-bit weights and inputs, smoothed.

    Args:
        strength: share of an input's size that moves into its weights, 0 to 1.
        head_bits: as `BaseQuantizer`.
    """

    name = "smoothquant"
    needs_calibration = True

    def __init__(self, strength: float = 0.5, head_bits: int = 8) -> None:
        super().__init__(head_bits)
        if not 0 <= strength <= 1:
            raise QuantizationError(f"strength is {strength}; allowed is 0 to 1.")
        self.strength = strength

    def quantize_layer(self, layer: nn.Module, sites: list[Site]) -> dict[str, Quantized]:
        for site in sites:
            producer = producer_of(layer, site)
            if producer is None:
                continue
            columns = [linear.weight.abs().amax(0) for linear in site.linears.values()]
            largest = producer.shared(sum(columns) / len(columns)).clamp(min=1e-5)
            inputs = producer.shared(site.largest).clamp(min=1e-5)
            scales = (inputs**self.strength / largest ** (1 - self.strength)).clamp(min=1e-5)
            producer.divide(scales)
            for linear in site.linears.values():
                linear.weight.data *= scales
            site.rescale(scales)
        return super().quantize_layer(layer, sites)
