"""Losses of quantized weights and KV schemas. Each is measured once, and kept in the cache."""

from pathlib import Path

from pydantic import ValidationError

from sagellm.core.cached_folder import default_cache_dir, write_whole
from sagellm.core.config import SageConfig
from sagellm.engines.lmdeploy.layout import model_digest
from sagellm.evaluate.report import QualityReport
from sagellm.evaluate.run import Options, beside_original

__all__ = ["known_loss", "measure_loss"]

TOKENS = 8_000


def known_loss(folder: Path, kv_schema: str) -> QualityReport | None:
    """Return the report that `measure_loss` kept; None if it never measured this choice.

    Args:
        folder: of the weights, quantized or not.
    """
    try:
        return QualityReport.model_validate_json(_file(folder, kv_schema).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def measure_loss(folder: Path, source: Path, kv_schema: str) -> QualityReport:
    """Evaluate weights with a KV schema beside the original in transformers in float32, and keep the report.

    Args:
        source: folder of the original.

    Raises:
        SageError: one of them cannot be loaded.
    """
    settings = SageConfig(model=folder, device="cpu", dtype="bfloat16", kv_schema=kv_schema)
    report = beside_original(f"{folder.name}, kv {kv_schema}", settings, source, Options(TOKENS, answers=0))
    file = _file(folder, kv_schema)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, report.model_dump_json(indent=1) + "\n")
    return report


def _file(folder: Path, kv_schema: str) -> Path:
    return default_cache_dir() / "losses" / f"{model_digest(folder, default_cache_dir())}-{kv_schema}.json"
