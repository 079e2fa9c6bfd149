"""The record of a quantized folder, and one quantized layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from sagellm.core.errors import QuantizationError

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT_NAME", "PROFILE_NAME", "LayerError", "QuantizationProfile", "Quantized"]

ALIGNMENT_NAME, PROFILE_NAME = "alignment.json", "quantization_profile.json"


class LayerError(BaseModel):
    """Error of one linear layer's weights against the same weights in float32.

    Attributes:
        cosine: between the outputs of both over the inputs of calibration; without calibration, between the weights.
        largest: largest difference of a weight.
        relative: norm of the difference of these outputs (or weights) over the norm of the float32 ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cosine: float
    largest: float
    relative: float


class QuantizationProfile(BaseModel):
    """Record of a quantized folder. It lies there as quantization_profile.json.

    Attributes:
        weight_bits: of the linear layers of decoder layers.
        group_size: inputs that share a scale; 0: all inputs of an output. FP8 has square blocks of that size.
        activation_bits: to which a linear layer rounds its inputs.
        kv_bits: of keys and values. Weights do not decide it: it is that of the model unless an engine is told otherwise.
        symmetric: whether zero is always the middle level.
        rounding: to the nearest level, or by `gptq`: errors of an input are made up for in others.
        ignored_layers: linear layers that keep their weights.
        head_bits: in which the CPU device holds the output layer.
        source: folder of the model that was quantized.
        calibration: texts, as `Calibration.facts`; empty if the method reads none.
        report: errors by layer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    weight_bits: int
    group_size: int
    activation_bits: int = 16
    kv_bits: int = 16
    symmetric: bool = False
    rounding: str = "nearest"
    ignored_layers: tuple[str, ...] = ("lm_head",)
    head_bits: int = 8
    source: str = ""
    calibration: dict[str, Any] = {}
    report: dict[str, LayerError] = {}

    @classmethod
    def read(cls, folder: Path) -> "QuantizationProfile":
        """Read the profile of a quantized folder.

        Raises:
            QuantizationError: it has none, or a damaged one.
        """
        try:
            return cls.model_validate_json((folder / PROFILE_NAME).read_text(encoding="utf-8"))
        except OSError as error:
            raise QuantizationError(f"{folder / PROFILE_NAME} cannot be read: {error.strerror}.") from None
        except ValueError as error:
            raise QuantizationError(f"{folder / PROFILE_NAME} is damaged: {error}; quantize the model again.") from None


@dataclass(frozen=True)
class Quantized:
    """One linear layer, quantized.

    Attributes:
        tensors: of the checkpoint, by the last part of their names.
        values: the weights that they stand for, float32 [outputs, inputs].
    """

    tensors: Mapping[str, "torch.Tensor"] = field(repr=False)
    values: "torch.Tensor" = field(repr=False)
