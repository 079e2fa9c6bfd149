"""The directory of the series: `series`, `manifest.json` and the patch files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from sagellm.core.errors import PatchError
from sagellm.patching.diff import Patch, parse_patch
from sagellm.patching.manifest import FILE_NAME, Chain, Manifest, load_manifest
from sagellm.patching.recipe import Recipe, build_recipes

_NAME = re.compile(r"^\d{4}-[a-z0-9-]+\.patch$")


def default_directory() -> Path:
    """`patches/` of the checkout, or the copy inside the package when it came from a wheel."""
    packaged = Path(__file__).parent / "series"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "patches"


def read_series(directory: Path) -> tuple[str, ...]:
    """The patch names in `series`, in order; empty lines and lines that start with # are skipped.

    Raises:
        PatchError: when there is no such file, a name is malformed, or the numbers do not ascend.
    """
    try:
        lines = (directory / "series").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PatchError(
            f"no patch series in {directory}: {error.strerror}; name its directory with --patches"
        ) from error
    except UnicodeError as error:
        raise PatchError(f"cannot read {directory / 'series'}: {error}; is it damaged?") from error
    names = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    for name in names:
        if not _NAME.match(name):
            raise PatchError(f"{directory / 'series'}: got {name!r}, a patch is named like 0001-what-it-opens.patch")
    if list(names) != sorted(set(names), key=lambda name: name[:4]) or len({n[:4] for n in names}) != len(names):
        raise PatchError(f"{directory / 'series'}: got {', '.join(names)}; each number once, in ascending order")
    return names


@dataclass
class PatchSet:
    """A series on disk. The patch files are read only when their text is needed; `--status` never needs it."""

    directory: Path
    names: tuple[str, ...]
    manifest: Manifest
    chains: dict[str, Chain] = field(default_factory=dict)

    @cached_property
    def patches(self) -> tuple[Patch, ...]:
        """The parsed patch files.

        Raises:
            PatchError: when one is missing, or touches other files than the manifest says.
        """
        patches = tuple(read_patch(self.directory, name) for name in self.names)
        for patch, entry in zip(patches, self.manifest.patches, strict=True):
            got, wanted = {f.path: f.new for f in patch.files}, {f.path: f.new for f in entry.files}
            if got != wanted:
                odd = ", ".join(sorted(path for path in {*got, *wanted} if got.get(path) != wanted.get(path)))
                raise PatchError(f"{patch.name} and {FILE_NAME} disagree about {odd}: run --refresh, or restore both")
        return patches

    @cached_property
    def _built(self) -> tuple[dict[str, Recipe], list[str]]:
        return build_recipes(self.patches)

    @property
    def recipes(self) -> dict[str, Recipe]:
        """Changes of the series, by path."""
        return self._built[0]

    @property
    def problems(self) -> list[str]:
        """Defects of the series itself, independent of the tree."""
        return self._built[1]


def read_patch(directory: Path, name: str) -> Patch:
    """Read one patch file of the series.

    Raises:
        PatchError: when it is missing or malformed.
    """
    try:
        return parse_patch(name, (directory / name).read_bytes())
    except OSError as error:
        raise PatchError(
            f"{name} is in the series, but cannot be read: {error}; restore it or --refresh {name[:4]}"
        ) from error


def load_patchset(directory: Path | None = None) -> PatchSet:
    """Read `series` and `manifest.json` and see that they agree.

    Raises:
        PatchError: when they do not.
    """
    directory = default_directory() if directory is None else directory
    names = read_series(directory)
    manifest = load_manifest(directory / FILE_NAME)
    known = tuple(patch.name for patch in manifest.patches)
    if known != names:
        odd = ", ".join(sorted(set(known) ^ set(names))) or "their order"
        raise PatchError(
            f"{directory}: series and {FILE_NAME} differ in {odd}; --refresh from a tree that has them all"
        )
    return PatchSet(directory, names, manifest, manifest.chains())
