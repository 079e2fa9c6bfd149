"""Reads GGUF files: metadata and tensors, with errors in one sentence.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package parses and dequantizes.
"""

from pathlib import Path
from typing import Any

import numpy as np

from sagellm.models.base import ModelError

__all__ = ["GGUFFile", "shortest"]

MAGIC = b"GGUF"


class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: the file.
        architecture: `general.architecture`, such as llama.
        tensors: tensors of the `gguf` package by name; their `data` is mapped, not read.

    Raises:
        ModelError: the file is no GGUF file, or it is truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        import gguf

        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
        if magic != MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}.")
        try:
            self._reader = gguf.GGUFReader(path)
        # The package checks nothing: a damaged file ends in whatever numpy or the parser raises.
        except Exception as error:
            raise self.damaged(str(error)) from None
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.need("general.architecture"))

    def damaged(self, why: str) -> ModelError:
        """Return the error for a file whose content makes no sense."""
        return ModelError(f"{self.path} is truncated or damaged ({why}); download it again.")

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata. `{arch}` in the key stands for the architecture."""
        field = self._reader.fields.get(key.replace("{arch}", getattr(self, "architecture", "")))
        if field is None:
            return default
        try:
            return field.contents()
        except Exception as error:
            raise self.damaged(f"{key}: {error}") from None

    def need(self, key: str) -> Any:
        """Return a value of the metadata that must be there."""
        value = self.get(key)
        if value is None:
            raise self.damaged(f"no {key.replace('{arch}', getattr(self, 'architecture', ''))} in its metadata")
        return value

    def array(self, name: str) -> np.ndarray:
        """Return a tensor in float32, [outputs, inputs] for a matrix.

        Raises:
            ModelError: a type that cannot be read, or values that are not finite.
        """
        import gguf

        tensor = self.tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {name} has type {tensor.tensor_type.name}, which the gguf package cannot read; "
                "give a file with another quantization."
            ) from None
        except Exception as error:
            raise self.damaged(f"tensor {name}: {error}") from None
        if not np.isfinite(values).all():
            raise self.damaged(f"tensor {name} has values that are not finite")
        return values


def shortest(value: float) -> float:
    """Return the shortest decimal number that is the same float32: GGUF keeps 1e-05 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))
