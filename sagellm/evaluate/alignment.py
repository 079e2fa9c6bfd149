"""The alignment report of a quantized folder: what its weights cost beside the model that it was made from."""

from pathlib import Path

from pydantic import ValidationError

from sagellm.accel.quantization.profile import ALIGNMENT_NAME, QuantizationProfile
from sagellm.core.cached_folder import write_whole
from sagellm.core.config import SageConfig
from sagellm.core.errors import QuantizationError
from sagellm.evaluate.report import Model, QualityReport, markdown
from sagellm.evaluate.run import Options, beside_original

__all__ = ["AlignmentReport", "measure_alignment", "page", "write_alignment"]

TOKENS, ANSWERS = 8_000, 20  # of a report by default


class AlignmentReport(Model):
    """Loss of a quantized model.

    Attributes:
        profile: of the folder, with the errors of its layers.
        quality: of the quantized model in this engine beside the original in transformers, in float32.
        bytes_stored: size of the folder's weights, and of the original's.
    """

    profile: QuantizationProfile
    quality: QualityReport
    bytes_stored: tuple[int, int]

    @classmethod
    def read(cls, folder: Path) -> "AlignmentReport":
        """Read the report of a folder.

        Raises:
            QuantizationError: it has none, or a damaged one.
        """
        try:
            return cls.model_validate_json((folder / ALIGNMENT_NAME).read_text(encoding="utf-8"))
        except OSError as error:
            raise QuantizationError(f"{folder / ALIGNMENT_NAME} cannot be read: {error.strerror}.") from None
        except ValidationError:
            raise QuantizationError(f"{folder / ALIGNMENT_NAME} is damaged; remove it and measure again.") from None


def measure_alignment(folder: Path, source: Path, options: Options | None = None, device: str = "auto") -> AlignmentReport:
    """Evaluate a quantized folder beside the model that it was made from.

    Raises:
        SageError: one of them cannot be loaded.
    """
    profile = QuantizationProfile.read(folder)
    name = f"{profile.method}, {profile.weight_bits} bits"
    settings = SageConfig(model=folder, device=device)
    quality = beside_original(name, settings, source, options or Options(TOKENS, answers=ANSWERS))
    return AlignmentReport(profile=profile, quality=quality, bytes_stored=(_stored(folder), _stored(source)))


def write_alignment(folder: Path, source: Path) -> AlignmentReport:
    """Measure, and write the report into the folder."""
    report = measure_alignment(folder, source)
    write_whole(folder / ALIGNMENT_NAME, report.model_dump_json(indent=1) + "\n")
    return report


def page(report: AlignmentReport) -> str:
    """Return the report as Markdown: quality, size, and the layers with the largest errors."""
    profile, (quantized, original) = report.profile, report.bytes_stored
    worst = sorted(profile.report.items(), key=lambda item: -item[1].relative)[:5]
    lines = [
        f"Method {profile.method}, {profile.weight_bits} bits, group size {profile.group_size or 'a whole row'}, "
        f"{len(profile.report)} layers. Weights: {quantized / 2**20:,.1f} MiB, {quantized / original:.2f} of the original.",
        "", markdown(report.quality), "| layer | relative error | cosine | largest error of a weight |", "|---|---|---|---|",
    ]  # fmt: skip
    lines += [f"| {name} | {error.relative:.4f} | {error.cosine:.6f} | {error.largest:.4g} |" for name, error in worst]
    return "\n".join(lines) + "\n"


def _stored(folder: Path) -> int:
    return sum(file.stat().st_size for pattern in ("*.safetensors", "pytorch_model*.bin") for file in folder.glob(pattern))
