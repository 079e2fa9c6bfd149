"""Converts a GGUF file once to a Hugging Face folder in the user's cache."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sagellm.core.cached_folder import build_once, default_cache_dir
from sagellm.core.file_hashes import hash_files
from sagellm.models.base import ModelError

if TYPE_CHECKING:
    from sagellm.models.gguf_config import Family
    from sagellm.models.gguf_file import GGUFFile

__all__ = ["Conversion", "StoredMatrix", "conversion_folder", "conversions", "convert_gguf", "models_dir", "read_conversion"]

# Raised whenever the code changes what a file becomes, so that an old folder is never taken for a new one.
FORMAT_VERSION = 4
RECORD_NAME = "conversion.json"


class StoredMatrix(BaseModel):
    """A matrix in a GGUF file.

    Attributes:
        kind: its type, such as Q4_1.
        outputs: its rows.
        offset, num_bytes: its place in the file.
        heads: number of heads whose halves are interleaved in its rows; 0 if none are.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    outputs: int
    offset: int
    num_bytes: int
    heads: int = 0


class Conversion(BaseModel):
    """Record of a converted file, written last into its folder.

    Attributes:
        source: path of the GGUF file that it was made from.
        sha256: hash of that file.
        matrices: its matrices by their names in transformers, without `.weight`. To read them anew needs no parser, which takes
            two seconds for a vocabulary.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    name: str
    source: Path
    sha256: str
    matrices: dict[str, StoredMatrix] = {}


def models_dir() -> Path:
    """Folder of converted models in the user's cache."""
    return default_cache_dir() / "models"


def read_conversion(folder: Path) -> Conversion | None:
    """Return the record of a finished folder of this version, or None."""
    try:
        record = Conversion.model_validate_json((folder / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError):
        return None
    return record if record.format_version == FORMAT_VERSION else None


def conversions() -> Iterator[tuple[Path, Conversion]]:
    """Yield the folders of all converted files with their records."""
    for file in sorted(models_dir().glob(f"gguf-*/{RECORD_NAME}")):
        record = read_conversion(file.parent)
        if record is not None:
            yield file.parent, record


def conversion_folder(path: Path) -> tuple[Path, str]:
    """Return the folder that a GGUF file is converted to, and the SHA-256 of the file.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        (digest,) = hash_files([path], default_cache_dir())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from None
    # No name of a model family in it: LMDeploy would take its built-in chat template for the file's own.
    return models_dir() / f"gguf-{digest[:16]}", digest


def convert_gguf(path: Path, name: str, sha256: str = "", quiet: bool = False) -> Path:
    """Return the folder of a converted GGUF file; the first call converts it.

    Processes that convert at once wait for the first. One that was killed leaves nothing that is used.

    Args:
        name: name of the model for `sagellm model list`.
        sha256: the hash that the file must have; "" allows any.
        quiet: no progress bar, even on a terminal.

    Raises:
        ModelError: the file cannot be read, is damaged or has another hash; its architecture or tokenizer cannot be
            converted; the cache cannot be written.
    """
    path = path.absolute()
    folder, found = conversion_folder(path)
    if sha256 and found != sha256:
        raise ModelError(f"{path} has SHA-256 {found}, not {sha256}: it was altered or is damaged; install it again.")
    if read_conversion(folder) is not None:
        return folder  # without the lock: a finished folder is never half there
    record = Conversion(name=name, source=path, sha256=found)
    try:
        build_once(
            folder, partial(read_conversion, folder), partial(_convert, record, quiet),
            waiting="" if quiet else f"Another process is converting {path.name}; waiting for it.",
        )  # fmt: skip
    except OSError as error:
        raise ModelError(
            f"{path.name} cannot be converted in {models_dir()}: {error.strerror or error}. Free some space, or set "
            "XDG_CACHE_HOME to a folder with more."
        ) from None
    return folder


def _convert(record: Conversion, quiet: bool, hidden: Path) -> Conversion:
    from sagellm.models.gguf_config import family_of, hf_config
    from sagellm.models.gguf_file import GGUFFile
    from sagellm.models.gguf_tokenizer import write_tokenizer
    from sagellm.models.gguf_weights import compute_dtype, write_weights

    file = GGUFFile(record.source)
    family = family_of(file)
    config = hf_config(file, compute_dtype(file))
    write_tokenizer(file, hidden, config["max_position_embeddings"])
    total = sum(int(tensor.n_elements) for tensor in file.tensors.values())
    with _progress(record.source.name, total, quiet) as tick:
        write_weights(file, family, config, hidden, tick)
    (hidden / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    record = record.model_copy(update={"matrices": _matrices(file, family, config)})
    (hidden / RECORD_NAME).write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return record


def _matrices(file: "GGUFFile", family: "Family", config: dict[str, Any]) -> dict[str, StoredMatrix]:
    from sagellm.models.gguf_weights import num_permuted_heads, tensor_names

    found = {}
    for ours, theirs in tensor_names(file, family, config).items():
        tensor = file.tensors[ours]
        if len(tensor.shape) == 2:
            found[theirs.removesuffix(".weight")] = StoredMatrix(
                kind=tensor.tensor_type.name, outputs=int(tensor.shape[1]), offset=int(tensor.data_offset),
                num_bytes=int(tensor.n_bytes), heads=num_permuted_heads(ours, family, config),
            )  # fmt: skip
    return found


@contextmanager
def _progress(name: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of elements that were written."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(f"Converting {name} (once)", total=total)
        yield lambda count: progress.advance(task, count)
