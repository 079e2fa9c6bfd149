"""The models on this machine: what is there, what it takes up, and how it is removed."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from sagellm.core.cached_folder import default_cache_dir, remove_built
from sagellm.models import packaged
from sagellm.models.base import ModelError
from sagellm.models.convert import conversion_folder, conversions, read_conversion
from sagellm.models.hub import split_revision
from sagellm.models.resolve import DEMO, local_path

__all__ = ["ModelFolder", "default_state", "local_models", "remove_model"]

HUB = "Hugging Face"


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


def remove_model(given: str) -> list[ModelFolder]:
    """Remove the folders of a model from the cache; the files that they were made from stay.

    Args:
        given: what `--model` takes, or a name or folder of `local_models`.

    Raises:
        ModelError: the cache has no such model or several of this name, or a folder cannot be removed.
    """
    built = [model for model in local_models() if model.folder is not None]
    found = _find(given, built)
    name, revision = split_revision(given)
    if not found and revision and any(model.name == name for model in built):
        raise ModelError(f"{name} is removed with all its revisions; leave out @{revision}.")
    if not found:
        names = ", ".join(sorted({model.name for model in built})) or "no models"
        raise ModelError(f"there is no model {given} in the cache; there are: {names}.")
    if len({model.source for model in found}) > 1:
        sources = ", ".join(model.source for model in found)
        raise ModelError(f"{len(found)} models in the cache have the name {given}; give the file of one: {sources}.")
    for model in found:
        assert model.folder is not None
        try:
            shutil.rmtree(model.folder) if model.source == HUB else remove_built(model.folder)
        except OSError as error:
            raise ModelError(f"{model.folder} cannot be removed: {error.strerror}.") from None
    return found


def _find(given: str, built: list[ModelFolder]) -> list[ModelFolder]:
    """Return the models that `given` stands for, by the same rules as `find_model`; a file is found by its content."""
    path = local_path(given)
    file = packaged.packaged_file() if given == packaged.DEFAULT_NAME else path
    if given != DEMO and file is not None and file.is_file():
        folder = conversion_folder(file)[0]
        return [model for model in built if model.folder == folder]
    paths = {str(path.absolute()), str(path.resolve())}
    return [model for model in built if model.name == given or paths & {model.source, str(model.folder)}]


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
        ModelFolder(repo.repo_id, HUB, repo.repo_path, repo.size_on_disk)
        for repo in sorted(models, key=lambda repo: repo.repo_id)
    ]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
