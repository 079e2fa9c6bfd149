"""Changing files so that a run killed at any point leaves each of them as it was or as it should be."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_LEFTOVER = ".sage-tmp"


def write_atomically(path: Path, text: bytes, like: Path) -> None:
    """Put `text` at `path` in one step, with the permissions of the file that was there, or else of `like`.

    The file is replaced, never changed in place: package installers hard-link files from their caches, and a write in
    place would reach through the link.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{_LEFTOVER}")
    model = os.stat(path if path.exists() else like)
    with open(temporary, "wb") as file:
        file.write(text)
        file.flush()
        os.fchmod(file.fileno(), model.st_mode & 0o7777)
        with contextlib.suppress(PermissionError):
            os.fchown(file.fileno(), model.st_uid, model.st_gid)
        os.fsync(file.fileno())
    os.replace(temporary, path)


def remove(path: Path, stop: Path) -> None:
    """Delete a file of ours with its compiled form, and the directories that are then empty, up to `stop`."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
    prune(path.parent, stop)


def prune(directory: Path, stop: Path) -> None:
    """Remove `directory` and its parents below `stop`, as far as nothing is left in them."""
    while directory != stop and stop in directory.parents:
        for empty in (directory / "__pycache__", directory):
            with contextlib.suppress(OSError):
                empty.rmdir()
        if directory.exists():
            return
        directory = directory.parent


def clean(directories: Iterable[Path]) -> None:
    """Delete what a killed run left half-written."""
    for directory in set(directories):
        if directory.is_dir():
            for leftover in directory.glob(f".*{_LEFTOVER}"):
                leftover.unlink(missing_ok=True)
