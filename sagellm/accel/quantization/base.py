"""The interface of a quantization method."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sagellm.accel.quantization.calibration import Calibration
from sagellm.accel.quantization.profile import QuantizationProfile, Quantized
from sagellm.accel.quantization.write import check_model, quantize_folder
from sagellm.core.errors import QuantizationError

if TYPE_CHECKING:
    from torch import nn

    from sagellm.accel.quantization.layers import Site

__all__ = ["BaseQuantizer"]


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
        check_model(self, Path(model_folder))

    def quantize(
        self, model_folder: Path, calibration: Calibration | None = None, out: Path | None = None
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
        return quantize_folder(self, Path(model_folder), calibration, out)
