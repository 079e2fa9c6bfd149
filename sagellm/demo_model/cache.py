"""Build the demo model once, in the user's cache or in a given folder."""

import os
import time
from functools import partial
from pathlib import Path

from sagellm.core.cached_folder import build_once, default_cache_dir
from sagellm.demo_model.base import DemoModelError, DemoModelRecord, DemoRecipe, read_record
from sagellm.demo_model.corpus import build_corpus
from sagellm.demo_model.progress import training_progress


def ensure_demo_model(
    cache_dir: str | os.PathLike[str] | None = None, *, quiet: bool = False, recipe: DemoRecipe | None = None
) -> Path:
    """Folder of the demo model, trained first when it is not there yet (one to two minutes, once).

    Args:
        cache_dir: folder that holds the model's folder; by default the user's cache.
        quiet: no progress bar, even on a terminal.
        recipe: what to build; by default the model that the documentation speaks of.

    Raises:
        DemoModelError: there is nothing to train on, or the folder cannot be written.
    """
    recipe = recipe or DemoRecipe()
    folder = Path(cache_dir or default_cache_dir()).expanduser().absolute() / recipe.folder_name()
    build_at(folder, recipe, quiet=quiet)
    return folder


def build_at(
    folder: Path, recipe: DemoRecipe, *, force: bool = False, quiet: bool = False
) -> tuple[DemoModelRecord, bool]:
    """Have the recipe's model at exactly `folder`; returns its record and whether it was there already.

    If two processes start, one trains and the other waits for it. A build removes the remains of a killed one.

    Args:
        force: train again even when the folder holds this very model, or a demo model of another recipe.

    Raises:
        DemoModelError: `folder` holds something else, which is never overwritten, or it cannot be written.
    """
    record = read_record(folder)
    if record and record.key == recipe.key() and not force:
        return record, True  # without the lock: a finished folder is never half there
    try:
        return build_once(
            folder, partial(_reusable, folder, recipe, force), partial(_build, recipe, quiet),
            waiting="" if quiet else "Another process is building the demo model; waiting for it.",
        )  # fmt: skip
    except OSError as error:
        raise DemoModelError(
            f"the demo model cannot be written to {folder}: {error}. "
            "Choose a folder that you may write to (--out, or XDG_CACHE_HOME for the cache), with 100 MB free."
        ) from error


def _reusable(folder: Path, recipe: DemoRecipe, force: bool) -> DemoModelRecord | None:
    """The record when the folder can be used as it is; None when it may be built (over)."""
    record = read_record(folder)
    if record and force:
        return None
    if record and record.key == recipe.key():
        return record
    if record:
        raise DemoModelError(
            f"{folder} holds a demo model of another recipe or Python (key {record.key}; asked for {recipe.key()}). "
            "Use --force to replace it, or choose another folder."
        )
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise DemoModelError(
            f"{folder} exists and is not a demo model; allowed are a folder that does not exist, an empty one, or an "
            "earlier demo model. Choose another folder, or remove this one yourself."
        )
    return None


def _build(recipe: DemoRecipe, quiet: bool, hidden: Path) -> DemoModelRecord:
    """Train, and write the model and its record into `hidden`."""
    start = time.perf_counter()
    corpus = build_corpus(recipe)
    with training_progress(recipe.steps, quiet) as tick:
        # Imported here: torch and transformers take seconds, which a cached model does not have to spend.
        from sagellm.demo_model.train import train_and_save

        result = train_and_save(recipe, corpus, hidden, tick)
    seconds = round(time.perf_counter() - start, 1)
    record = DemoModelRecord(
        key=recipe.key(), parameters=result.parameters, loss=result.loss, seconds=seconds, steps=recipe.steps
    )
    record.write(hidden)
    return record
