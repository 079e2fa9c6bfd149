"""Description of the bytes of a KV block in one line: everything they depend on besides its tokens."""

import hashlib
from pathlib import Path

from sagellm import __version__
from sagellm.core.config import SageConfig
from sagellm.core.file_hashes import hash_files
from sagellm.engines.lmdeploy.sizing import Sizes

# Other files of a model's folder may be weights, or code that computes with them.
NO_PART = (
    "tokenizer",
    "vocab",
    "merges",
    "special_tokens",
    "added_tokens",
    "chat_template",
    "generation_config",
    "readme",
    "license",
)
NO_PART_SUFFIXES = (".md", ".txt", ".jinja", ".png", ".jpg", ".pdf")


def weights_of(model: Path, config: SageConfig, sizes: Sizes, cache_dir: Path | None = None) -> str:
    """A word that differs wherever keys and values of the same tokens may, however they are stored."""
    packed = "-packed" if config.weights == "packed" else ""
    return f"{model_digest(model, cache_dir)}-{sizes.weights_dtype}{packed}"


def layout_of(model: Path, config: SageConfig, sizes: Sizes, device: str, cache_dir: Path | None = None) -> str:
    """A line that differs wherever the bytes of a block may.

    Every file of the model is hashed wholly. Hashes of unchanged files (by path, device, inode, size and times) come
    from a file in `cache_dir`, if one is given and can be written.
    """
    from lmdeploy.version import __version__ as lmdeploy_version

    weights = ", packed weights" if config.weights == "packed" else ""
    return (
        f"{model_digest(model, cache_dir)} {sizes.schema.to_json()} of {sizes.weights_dtype}, {config.tensor_parallel} "
        f"workers, all keys before all values; {device}, lmdeploy {lmdeploy_version}, sagellm {__version__}{weights}"
    )


def model_digest(model: Path, cache_dir: Path | None) -> str:
    """Return a word that differs wherever a file of the folder differs that a model computes with."""
    files = _files(model)
    total = hashlib.sha256()
    for file, digest in zip(files, hash_files(files, cache_dir), strict=True):
        total.update(f"{file.relative_to(model)} {digest}\n".encode())
    return total.hexdigest()[:32]


def _files(model: Path) -> list[Path]:
    found = {file for file in model.iterdir() if not _is_no_part(file)} | set(model.rglob("*.py"))
    return sorted(file for file in found if file.is_file())


def _is_no_part(file: Path) -> bool:
    name = file.name.lower()
    return name.startswith((".", *NO_PART)) or name.endswith(NO_PART_SUFFIXES)
