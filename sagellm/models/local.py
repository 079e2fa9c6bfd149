"""The models on this machine: what is there, what it takes up, and how it is removed."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from sagellm.core.cached_folder import default_cache_dir
from sagellm.models import packaged
from sagellm.models.base import ModelError
from sagellm.models.convert import conversion_folder, conversions, read_conversion
from sagellm.models.resolve import DEMO

__all__ = ["ModelFolder", "default_state", "local_models", "remove_model"]


class ModelFolder(NamedTuple):
    """A folder of this machine that a name of `--model` stands for.

    Attributes:
        source: where it was made from: a GGUF file, a hub, or the demo recipe.
        folder: None if the model is installed and not converted yet.
        num_bytes: size on disk.
    """

    name: str
    source: str
    folder: Path | None
    num_bytes: int

    def row(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return self._asdict() | {"folder": None if self.folder is None else str(self.folder)}


def default_state() -> tuple[str, str]:
    """Return what there is to say about the default model, and the command that gets it, "" if none is needed."""
    file = packaged.packaged_file()
    if file is None:
        return f"{packaged.DEFAULT_NAME} is not installed; the server falls back to the demo model", packaged.GET
    return f"{packaged.DEFAULT_NAME} is {'ready' if _is_converted(file) else 'installed; the first start converts it'}", ""


def local_models() -> list[ModelFolder]:
    """List the default model, converted files, demo models, and models in Hugging Face's cache."""
    models = [
        ModelFolder(record.name, str(record.source), folder, _size(folder)) for folder, record in conversions()
    ]
    file = packaged.packaged_file()
    if file is not None and not _is_converted(file):
        models.insert(0, ModelFolder(packaged.DEFAULT_NAME, str(file), None, file.stat().st_size))
    for folder in sorted(default_cache_dir().glob("demo-model-*")):
        models.append(ModelFolder(DEMO, "trained here", folder, _size(folder)))
    return models + _hub_models()


def remove_model(name: str) -> list[ModelFolder]:
    """Remove the folders of a model from the cache; the files that they were made from stay.

    Raises:
        ModelError: no folder has this name, or it cannot be removed.
    """
    found = [model for model in local_models() if model.name == name and model.folder is not None]
    if not found:
        names = ", ".join(sorted({model.name for model in local_models() if model.folder is not None})) or "no models"
        raise ModelError(f"there is no model {name} in the cache; there are: {names}.")
    for model in found:
        try:
            shutil.rmtree(model.folder)
        except OSError as error:
            raise ModelError(f"{model.folder} cannot be removed: {error.strerror}.") from None
    return found


def _is_converted(file: Path) -> bool:
    return read_conversion(conversion_folder(file)[0]) is not None


def _hub_models() -> list[ModelFolder]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    models = [repo for repo in repos if repo.repo_type == "model"]
    return [
        ModelFolder(repo.repo_id, "Hugging Face", repo.repo_path, repo.size_on_disk)
        for repo in sorted(models, key=lambda repo: repo.repo_id)
    ]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
