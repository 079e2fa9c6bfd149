"""The interface of a quantization method."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from sagellm.core.errors import QuantizationError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sagellm.accel.quantization.calibration import Calibration
    from sagellm.accel.quantization.layers import Site

__all__ = ["ALIGNMENT_NAME", "PROFILE_NAME", "BaseQuantizer", "LayerError", "QuantizationProfile", "Quantized"]

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
    """What a quantized folder holds. It lies there as quantization_profile.json.

    Attributes:
        weight_bits: of the linear layers of decoder layers.
        group_size: inputs that share a scale; 0: all inputs of an output. FP8 has square blocks of that size.
        activation_bits: to which a linear layer rounds its inputs.
        kv_bits: of keys and values. Weights do not decide it: it is that of the model unless an engine is told otherwise.
        symmetric: whether zero is always the middle level.
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


class BaseQuantizer(ABC):
    """A way to quantize the linear layers of a model's decoder layers.

    A subclass has a `name` and answers `quantize_layer`, `settings` and `profile`. It is found by its file in `methods/`, by an
    entry point of the group `sagellm.quantizers`, or as `module:Class`.

    Attributes:
        name: the method, on the command line.
        needs_calibration: whether it looks at the inputs of layers.
        has_whole_groups: whether `group_size` of the profile must divide the inputs of each layer.

    Args:
        head_bits: 8 or 16; bits in which the CPU device holds the output layer. The folder keeps it in 16 bits.

    Raises:
        QuantizationError: an option that is not allowed.
    """

    name: ClassVar[str]
    needs_calibration: ClassVar[bool] = False
    has_whole_groups: ClassVar[bool] = False

    def __init__(self, head_bits: int = 8) -> None:
        if head_bits not in (8, 16):
            raise QuantizationError(f"head_bits is {head_bits}; allowed are 8 and 16.")
        self.head_bits = head_bits

    @abstractmethod
    def profile(self) -> QuantizationProfile:
        """Return the profile without calibration and report."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return `quantization_config` of config.json, by which engines find the layout."""

    @abstractmethod
    def quantize_layer(self, layer: "nn.Module", sites: "list[Site]") -> dict[str, Quantized]:
        """Quantize one decoder layer.

        Args:
            layer: of transformers, in float32. It may be changed as long as it computes the same, for example scaled.
            sites: its linear layers with their inputs; without `needs_calibration` the inputs are empty.

        Returns:
            Each linear layer by its name in the decoder layer.

        Raises:
            QuantizationError: a layer that cannot be quantized.
        """

    def check(self, model_folder: Path) -> None:
        """Check whether a folder can be quantized, without loading it.

        Raises:
            QuantizationError, ModelError: it cannot.
        """
        from sagellm.accel.quantization.write import check_model

        check_model(self, Path(model_folder))

    def quantize(
        self, model_folder: Path, calibration: "Calibration | None" = None, out: Path | None = None
    ) -> QuantizationProfile:
        """Write a quantized copy of a Hugging Face folder.

        Args:
            calibration: texts; None is `Calibration.default()`. A method without `needs_calibration` does not read it.
            out: folder to write, which must not exist; by default the model's name with the method's, beside it.

        Returns:
            The profile, which the folder holds too.

        Raises:
            QuantizationError, ModelError: the model, the texts or the folder cannot be used. Nothing half-made is left.
        """
        from sagellm.accel.quantization.write import quantize_folder

        return quantize_folder(self, Path(model_folder), calibration, out)
