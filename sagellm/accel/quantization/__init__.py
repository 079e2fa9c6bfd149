"""Quantized weights: methods, profiles, and the folders that engines load."""

from sagellm.accel.quantization.base import BaseQuantizer
from sagellm.accel.quantization.calibration import Calibration
from sagellm.accel.quantization.profile import LayerError, QuantizationProfile, Quantized
from sagellm.accel.quantization.registry import QUANTIZERS, make_quantizer

__all__ = [
    "QUANTIZERS", "BaseQuantizer", "Calibration", "LayerError", "QuantizationProfile", "Quantized", "make_quantizer",
]  # fmt: skip
