"""Texts that quantization is calibrated with."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core.errors import QuantizationError
from sagellm.models.texts import calibration_texts

if TYPE_CHECKING:
    import torch

__all__ = ["Calibration"]

CHARS_PER_TOKEN = 100  # of a default text, for each token that is taken from it: pieces are far apart


@dataclass(frozen=True)
class Calibration:
    """Texts, and how much of them a model reads.

    Attributes:
        texts: pieces are taken from each of them in equal number.
        source: where they come from.
        pieces: pieces in all.
        length: tokens of a piece.
    """

    texts: tuple[str, ...]
    source: str
    pieces: int = 32
    length: int = 512

    @classmethod
    def default(cls, pieces: int = 32, length: int = 512) -> "Calibration":
        """Take Python's documentation and sources, other parts than `sagellm evaluate` takes."""
        texts = calibration_texts()
        size = CHARS_PER_TOKEN * length * -(-pieces // len(texts))
        return cls(tuple(text[:size] for text in texts), "Python's documentation and sources", pieces, length)

    @classmethod
    def from_file(cls, path: Path, pieces: int = 32, length: int = 512) -> "Calibration":
        """Read a text file.

        Raises:
            QuantizationError: it cannot be read as UTF-8.
        """
        try:
            return cls((path.read_text(encoding="utf-8"),), str(path), pieces, length)
        except OSError as error:
            raise QuantizationError(f"calibration text {path} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise QuantizationError(f"calibration text {path} is not UTF-8; convert it.") from None

    def tokens(self, tokenizer: Any) -> "torch.Tensor":
        """Cut pieces at even distances, int64 [pieces, length].

        Raises:
            QuantizationError: the texts are too short.
        """
        import torch

        share = -(-self.pieces // len(self.texts))
        found = []
        for text in self.texts:
            ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            if len(ids) < self.length + share:
                raise QuantizationError(
                    f"calibration text has {len(ids)} tokens; {share} pieces of {self.length} need at least "
                    f"{self.length + share}, and different ones {share * self.length}. Give a longer text, or fewer pieces."
                )
            step = (len(ids) - self.length) / max(1, share - 1)
            found += [ids[int(number * step) :][: self.length] for number in range(share)]
        return torch.tensor(found[: self.pieces])

    def facts(self) -> dict[str, Any]:
        """Return what a report says about the calibration."""
        digest = hashlib.sha256("\0".join(self.texts).encode()).hexdigest()
        return {"source": self.source, "sha256": digest, "pieces": self.pieces, "length": self.length}
