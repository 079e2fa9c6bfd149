"""Find quantization methods by name: the files of `methods/`, installed packages, and `module:Class`."""

from typing import Any

from sagellm.accel.quantization.base import BaseQuantizer
from sagellm.core.errors import QuantizationError
from sagellm.core.registry import Registry

__all__ = ["QUANTIZERS", "make_quantizer"]

QUANTIZERS = Registry(
    "quantization method", BaseQuantizer, QuantizationError, "sagellm.quantizers", folder="sagellm.accel.quantization.methods"
)


def make_quantizer(name: str, **options: Any) -> BaseQuantizer:
    """Return a quantizer. Raises QuantizationError if the method is unknown or its options are invalid."""
    return QUANTIZERS.make(QUANTIZERS.find(name), name, **options)
