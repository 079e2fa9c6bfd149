"""Build the demo model once: a lock, a hidden folder beside the final one, and a rename when everything is in it."""

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sagellm.demo_model.base import DemoModelError, DemoModelRecord, DemoRecipe, read_record
from sagellm.demo_model.corpus import build_corpus
from sagellm.demo_model.progress import training_progress


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/sagellm`, or `~/.cache/sagellm`; a relative value is ignored, as the XDG rules ask."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "sagellm"


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
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, quiet):
            record = _reusable(folder, recipe, force)
            if record:
                return record, True
            _remove_leftovers(folder)
            return _build(folder, recipe, quiet), False
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


def _build(folder: Path, recipe: DemoRecipe, quiet: bool) -> DemoModelRecord:
    """Train in a hidden folder and rename it into place. The lock is held."""
    start = time.perf_counter()
    corpus = build_corpus(recipe)
    hidden = Path(tempfile.mkdtemp(prefix=_leftover_prefix(folder), dir=folder.parent))
    try:
        with training_progress(recipe.steps, quiet) as tick:
            # Imported here: torch and transformers take seconds, which a cached model does not have to spend.
            from sagellm.demo_model.train import train_and_save

            result = train_and_save(recipe, corpus, hidden, tick)
        seconds = round(time.perf_counter() - start, 1)
        record = DemoModelRecord(
            key=recipe.key(), parameters=result.parameters, loss=result.loss, seconds=seconds, steps=recipe.steps
        )
        record.write(hidden)
        # mkdtemp and safetensors make theirs private; a server may run as another user.
        hidden.chmod(0o755)
        for path in hidden.iterdir():
            path.chmod(0o644)
        if folder.exists():
            # Renamed, not removed, so that no reader ever sees a folder with some of its files gone.
            folder.rename(Path(tempfile.mkdtemp(prefix=_leftover_prefix(folder), dir=folder.parent)) / "old")
        hidden.rename(folder)
        return record
    finally:
        _remove_leftovers(folder)


def _leftover_prefix(folder: Path) -> str:
    return f".{folder.name}.building-"


def _remove_leftovers(folder: Path) -> None:
    """Remove hidden folders of builds that ended early. The lock is held, so none of them is in use."""
    for path in folder.parent.iterdir():
        if path.name.startswith(_leftover_prefix(folder)):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _lock(folder: Path, quiet: bool) -> Iterator[None]:
    """Hold the lock of `folder`; the kernel gives it back when a process dies.

    The lock file stays: removing it would let a third process lock a new file while a second waits on the old one.
    """
    with open(folder.parent / f".{folder.name}.lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not quiet and sys.stderr.isatty():
                print("Another process is building the demo model; waiting for it.", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
