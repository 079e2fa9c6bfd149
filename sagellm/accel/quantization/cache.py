"""Quantized copies in the user's cache: made once for a model and a method."""

import hashlib
from pathlib import Path

from sagellm.accel.quantization.base import BaseQuantizer
from sagellm.accel.quantization.calibration import Calibration
from sagellm.accel.quantization.profile import PROFILE_NAME
from sagellm.core.cached_folder import default_cache_dir
from sagellm.core.errors import QuantizationError
from sagellm.core.file_hashes import hash_files

__all__ = ["FORMAT_VERSION", "cached_copy", "quantized_copy"]

FORMAT_VERSION = 2  # raised whenever a method writes other weights than before


def cached_copy(model: Path, quantizer: BaseQuantizer, calibration: Calibration | None = None) -> Path:
    """Return the folder that `quantized_copy` writes or has written."""
    files = sorted([*model.glob("*.safetensors"), *model.glob("pytorch_model*.bin"), model / "config.json"])
    try:
        hashes = hash_files(files, default_cache_dir())
    except OSError as error:
        raise QuantizationError(f"{model} cannot be read: {error.strerror}.") from None
    if quantizer.needs_calibration:
        hashes.append(str((calibration or Calibration.default()).facts()))
    settings = quantizer.profile().model_dump_json()
    key = hashlib.sha256("\n".join([str(FORMAT_VERSION), settings, str(quantizer.settings()), *hashes]).encode()).hexdigest()
    # No name of a model family in it: LMDeploy would take its built-in chat template for the model's own.
    return default_cache_dir() / "models" / f"{quantizer.name}-{key[:16]}"


def quantized_copy(model: Path, quantizer: BaseQuantizer, calibration: Calibration | None = None) -> Path:
    """Return a quantized copy of a model's folder; the first call makes it.

    Raises:
        QuantizationError, ModelError: as `BaseQuantizer.quantize`.
    """
    folder = cached_copy(model, quantizer, calibration)
    if not (folder / PROFILE_NAME).is_file():
        try:
            quantizer.quantize(model, calibration, folder)
        except QuantizationError:
            if not (folder / PROFILE_NAME).is_file():  # else another process has finished it meanwhile
                raise
    return folder
