"""Entry points and versions of installed packages."""

import os
import sys
from functools import cache
from importlib import metadata

__all__ = ["entry_points", "version_of"]


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of a group.

    Reading the installed packages takes 15 ms, and an engine asks often. So they are read again only after a folder of
    Python's search path has changed: something was installed, upgraded or removed there.
    """
    return _entry_points(group, tuple((folder, _changed(folder)) for folder in sys.path))


def _changed(folder: str) -> int | None:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return None


@cache
def _entry_points(group: str, folders: tuple[tuple[str, int | None], ...]) -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group=group))
