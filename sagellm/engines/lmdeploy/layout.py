"""Description of the bytes of a KV block in one line: everything they depend on besides its tokens."""

import hashlib
import json
import os
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from sagellm import __version__
from sagellm.core.config import SageConfig
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
CACHE_NAME = "weights.json"


def weights_of(model: Path, sizes: Sizes, cache_dir: Path | None = None) -> str:
    """A word that differs wherever keys and values of the same tokens may, however they lie in memory."""
    return f"{_digest(model, cache_dir)}-{sizes.schema.dtype}"


def layout_of(model: Path, config: SageConfig, sizes: Sizes, device: str, cache_dir: Path | None = None) -> str:
    """A line that differs wherever the bytes of a block may.

    Every file of the model is hashed wholly. Hashes of unchanged files (by path, device, inode, size and times) come
    from a file in `cache_dir`, if one is given and can be written.
    """
    schema = sizes.schema
    shape = f"{schema.num_layers}x{schema.num_kv_heads}x{schema.head_dim} {schema.dtype} {schema.block_size} tokens"
    return (
        f"{_digest(model, cache_dir)} {shape} {config.tensor_parallel} workers, all keys before all values; "
        f"{device}, lmdeploy {version('lmdeploy')}, sagellm {__version__}"
    )


def _digest(model: Path, cache_dir: Path | None) -> str:
    known = _read(cache_dir)
    digests: dict[str, str] = {}
    total = hashlib.sha256()
    for file in _files(model):
        status = file.stat()
        times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
        identity = f"{file.resolve()} {status.st_dev} {status.st_ino} {status.st_size} {times}"
        digests[identity] = known.get(identity) or _hash(file)
        total.update(f"{file.relative_to(model)} {digests[identity]}\n".encode())
    if cache_dir is not None and digests.keys() - known.keys():
        _write(cache_dir, digests)
    return total.hexdigest()[:32]


def _files(model: Path) -> list[Path]:
    found = {file for file in model.iterdir() if not _is_no_part(file)} | set(model.rglob("*.py"))
    return sorted(file for file in found if file.is_file())


def _is_no_part(file: Path) -> bool:
    name = file.name.lower()
    return name.startswith((".", *NO_PART)) or name.endswith(NO_PART_SUFFIXES)


def _hash(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as content:
        while piece := content.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _read(cache_dir: Path | None) -> dict[str, str]:
    if cache_dir is None:
        return {}
    try:
        content = json.loads((cache_dir / CACHE_NAME).read_text())
        return {str(identity): str(digest) for identity, digest in content.items()}
    except (OSError, ValueError, AttributeError):  # missing, or not ours: everything is hashed again
        return {}


def _write(cache_dir: Path, digests: dict[str, str]) -> None:
    part = cache_dir / f"{CACHE_NAME}.{os.getpid()}"
    with suppress(OSError):  # the next start takes as long as this one
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(digests))
            part.rename(cache_dir / CACHE_NAME)
        finally:
            part.unlink(missing_ok=True)
