"""From what `--model` was given to a folder that LMDeploy loads."""

import sys
from pathlib import Path
from typing import Literal, NamedTuple

from sagellm.models import packaged
from sagellm.models.base import ModelError
from sagellm.models.convert import convert_gguf
from sagellm.models.folder import check_folder, sampling_defaults
from sagellm.models.hub import fetch, is_hub_id, split_revision

__all__ = ["DEMO", "DEMO_NAME", "ModelSource", "find_model", "local_path", "prepare_model"]

DEMO, DEMO_NAME = "demo", "sagellm-demo"
FORMS = "allowed are smollm2, demo, a Hugging Face folder, a .gguf file, or a hub id org/name[@revision]"


class ModelSource(NamedTuple):
    """Where a model comes from.

    Attributes:
        kind: how `prepare` gets its folder.
        name: name in the API.
        where: path or hub id; "" for the demo model.
        is_fallback: whether the demo model takes the place of the default model.
    """

    kind: Literal["demo", "packaged", "folder", "gguf", "hub"]
    name: str
    where: str = ""
    is_fallback: bool = False

    def sampling(self, folder: Path) -> dict[str, float]:
        """Return what a request samples with where it does not say: as `sampling_defaults`.

        Args:
            folder: as `prepare` returned it.
        """
        return dict(packaged.SAMPLING) if self.kind == "packaged" else sampling_defaults(folder)

    def prepare(self, quiet: bool = False) -> Path:
        """Return the model's folder; builds, converts or downloads it first if need be.

        Args:
            quiet: no progress bar, even on a terminal.

        Raises:
            ModelError, DemoModelError: in one sentence, with what to do.
        """
        match self.kind:
            case "demo":
                from sagellm.demo_model import ensure_demo_model

                return ensure_demo_model(quiet=quiet)
            case "packaged":
                return convert_gguf(Path(self.where), self.name, packaged.FILE_SHA256, quiet)
            case "gguf":
                return convert_gguf(Path(self.where), self.name, quiet=quiet)
            case "hub":
                return fetch(self.where)
        return Path(self.where)


def find_model(given: str | Path | None) -> ModelSource:
    """Find out what `given` names; None is the default model. Nothing is built or downloaded.

    The name of a known model goes before a folder of that name, which can be written as ./NAME.

    Raises:
        ModelError: nothing has this name.
    """
    text = "" if given is None else str(given)
    if text == DEMO:
        return ModelSource("demo", DEMO_NAME)
    if text in ("", packaged.DEFAULT_NAME):
        file = packaged.packaged_file()
        if file is not None:
            return ModelSource("packaged", packaged.DEFAULT_NAME, str(file))
        if not text:
            return ModelSource("demo", DEMO_NAME, is_fallback=True)
        raise ModelError(f"the model {text} is not installed; run `{packaged.GET}`, or give --model demo.")
    path = local_path(text)
    if path.is_dir():
        return ModelSource("folder", path.resolve().name, str(path))
    if path.is_file():
        return ModelSource("gguf", path.name.removesuffix(".gguf"), str(path))
    if is_hub_id(text) and not text.endswith(".gguf"):
        return ModelSource("hub", split_revision(text)[0], text)
    raise ModelError(f"--model {text}: there is no such folder or file; {FORMS}.")


def local_path(text: str) -> Path:
    """Return the path that `text` names, whether or not something is there.

    Raises:
        ModelError: the system cannot look there, for example because the name is too long.
    """
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"{text} cannot be looked up: {getattr(error, 'strerror', None) or error}; {FORMS}.") from None
    return path


def prepare_model(source: ModelSource) -> Path:
    """Return the model's folder as `ModelSource.prepare` does, and check it.

    Says on standard error when the demo model takes the place of the default model.

    Raises:
        ModelError, DemoModelError: the model cannot be had or served.
    """
    if source.is_fallback:
        print(
            f"note: the default model {packaged.DEFAULT_NAME} is not installed; the demo model, which cannot hold a "
            f"conversation, takes its place. Get the real one: {packaged.GET}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    folder = source.prepare()
    check_folder(folder)
    return folder
