"""Files that are written at once, and folders that are built once.

A folder has a lock, a hidden folder beside the final one, and a rename when everything is in it.

They are removed the other way round: renamed to a hidden folder, then deleted.
"""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

__all__ = ["build_once", "default_cache_dir", "remove_built", "write_whole"]

Record = TypeVar("Record")


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/sagellm`, or `~/.cache/sagellm`; a relative value is ignored, as the XDG rules ask."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "sagellm"


def write_whole(file: Path, text: str) -> None:
    """Write a file in place of what was there, at once for every reader.

    Raises:
        OSError: it cannot be written. An older file stays then.
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def build_once(
    folder: Path, find: Callable[[], Record | None], build: Callable[[Path], Record], waiting: str = ""
) -> tuple[Record, bool]:
    """Return the record of `folder`, which `build` writes first if `find` has none, and whether it was there already.

    If two processes start, one builds and the other waits. A build removes the remains of a killed one.

    Args:
        find: returns the record of a finished folder, or None if it may be built, over an older one if need be.
        build: writes everything into the hidden folder that it is given, the record last.
        waiting: what to print on a terminal while another process builds.

    Raises:
        OSError: the folder cannot be written. Nothing half-made is left.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder, waiting):
        record = find()
        if record is not None:
            return record, True
        _remove_leftovers(folder)
        try:
            return _build(folder, build), False
        finally:
            _remove_leftovers(folder)


def remove_built(folder: Path) -> None:
    """Remove a folder that `build_once` wrote, at once for every reader. The remains of a killed call go with the next build.

    Raises:
        OSError: the folder is not there or cannot be renamed.
    """
    with _lock(folder, ""):
        _set_aside(folder)
        _remove_leftovers(folder)


def _build(folder: Path, build: Callable[[Path], Record]) -> Record:
    """Build in a hidden folder and rename it into place. The lock is held."""
    hidden = Path(tempfile.mkdtemp(prefix=_leftover_prefix(folder), dir=folder.parent))
    record = build(hidden)
    # mkdtemp and safetensors make theirs private; a server may run as another user.
    hidden.chmod(0o755)
    for path in hidden.iterdir():
        path.chmod(0o644)
    if folder.exists():
        _set_aside(folder)
    hidden.rename(folder)
    return record


def _set_aside(folder: Path) -> None:
    """Rename the folder to a hidden one, so that no reader ever sees it with some of its files gone. The lock is held."""
    folder.rename(Path(tempfile.mkdtemp(prefix=_leftover_prefix(folder), dir=folder.parent)) / "old")


def _leftover_prefix(folder: Path) -> str:
    return f".{folder.name}.building-"


def _remove_leftovers(folder: Path) -> None:
    """Remove hidden folders of builds that ended early. The lock is held, so none of them is in use."""
    for path in folder.parent.iterdir():
        if path.name.startswith(_leftover_prefix(folder)):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _lock(folder: Path, waiting: str) -> Iterator[None]:
    """Hold the lock of `folder`; the kernel gives it back when a process dies.

    The lock file stays: removing it would let a third process lock a new file while a second waits on the old one.
    """
    with open(folder.parent / f".{folder.name}.lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting and sys.stderr.isatty():
                print(waiting, file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
