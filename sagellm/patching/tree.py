"""An LMDeploy tree to patch: where it is, which version it is, what it holds. LMDeploy is never imported for it."""

from __future__ import annotations

import base64
import contextlib
import csv
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sagellm.core.errors import PatchError
from sagellm.patching.markers import TEXT_SUFFIXES, marker_of, owner_of
from sagellm.patching.patchset import default_directory

_VERSION = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_CPP_SOURCES = "src/turbomind"


@dataclass(frozen=True)
class Target:
    """One tree. `package` holds the Python files; `root` is its parent, a repository or a site-packages directory."""

    package: Path
    root: Path
    has_cpp: bool

    def path(self, name: str) -> Path:
        """Where the repository path `name` lies in this tree."""
        return self.package / name[len("lmdeploy/") :] if tree_of(name) == "python" else self.root / name

    def holds(self, tree: str) -> bool:
        """Whether files of `tree` (python, cpp) belong to this target; a wheel carries no C++ sources."""
        return tree == "python" or self.has_cpp

    def read(self, name: str) -> bytes | None:
        """The text of a file, or None when it is not there."""
        path = self.path(name)
        with _named(path):
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def version(self) -> str:
        """`__version__` as version.py spells it."""
        file = self.package / "version.py"
        with _named(file):
            match = _VERSION.search(file.read_text(encoding="utf-8"))
        if match is None:
            raise PatchError(f"{file} names no __version__; is this LMDeploy?")
        return match[1]


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raises PatchError, with the name of the file, where it cannot be read or is not what it should be."""
    try:
        yield
    except OSError as error:
        raise PatchError(f"cannot read {error.filename or path}: {error.strerror}") from error
    except (ValueError, csv.Error) as error:  # UnicodeError is a ValueError
        raise PatchError(f"cannot read {path}: {error}; is it damaged?") from error


def tree_of(name: str) -> str:
    """`python` for files of the Python package, `cpp` for everything else a patch may touch."""
    return "python" if name.startswith("lmdeploy/") else "cpp"


def locate(directory: Path | str) -> Target:
    """The LMDeploy tree at `directory`: a repository, a site-packages directory or the package directory itself.

    Raises:
        PatchError: no LMDeploy is there.
    """
    directory = Path(directory).absolute()
    with _named(directory):
        for package in (directory / "lmdeploy", directory):
            if (package / "version.py").is_file() and (package / "__init__.py").is_file():
                # A package directory under another name is a copy: what lies beside it is not LMDeploy's.
                has_cpp = package.name == "lmdeploy" and (package.parent / _CPP_SOURCES).is_dir()
                return Target(package, package.parent, has_cpp)
    raise PatchError(f"no LMDeploy in {directory}: wanted a directory with lmdeploy/version.py, or lmdeploy itself")


def installed_package() -> Path | None:
    """The lmdeploy package directory of the running Python environment, found without importing it."""
    try:
        spec = importlib.util.find_spec("lmdeploy")
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or []) if spec else []
    return next((Path(where) for where in locations if (Path(where) / "version.py").is_file()), None)


def submodule_package() -> Path | None:
    """The lmdeploy package directory of the checked-out submodule, if there is one."""
    package = default_directory().parent / "third_party" / "lmdeploy" / "lmdeploy"
    return package if (package / "version.py").is_file() else None


def default_target() -> Path:
    """The LMDeploy installed in the running Python environment.

    Raises:
        PatchError: when none is installed.
    """
    package = installed_package()
    if package is None:
        raise PatchError(
            "no LMDeploy is installed in this Python environment; run ./apply_patches.sh, or name a --target"
        )
    return package


def default_targets() -> list[Path]:
    """The installed LMDeploy and the checked-out submodule, each if it is there, each once."""
    found = [path for path in (installed_package(), submodule_package()) if path is not None]
    if not found:
        return [default_target()]
    return list({path.resolve(): path for path in found}.values())


def marked_files(target: Target) -> Iterator[tuple[str, bytes]]:
    """Every file of the tree that carries a marker, by repository path, with its text."""
    for name in _text_files(target):
        text = target.read(name)
        if text is None or b"sage:" not in text:
            continue
        if owner_of(text, name) or any(marker_of(line, name) for line in text.split(b"\n")):
            yield name, text


def _text_files(target: Target) -> Iterator[str]:
    roots = [(target.package, "lmdeploy")]
    if target.has_cpp:
        roots.append((target.root / "src", "src"))
        yield from (name for name in ("CMakeLists.txt",) if (target.root / name).is_file())
    for top, prefix in roots:
        for directory, subdirectories, files in os.walk(top):
            subdirectories[:] = sorted(name for name in subdirectories if name != "__pycache__")
            for name in sorted(files):
                if os.path.splitext(name)[1] in TEXT_SUFFIXES:
                    yield str(Path(prefix, os.path.relpath(os.path.join(directory, name), top)).as_posix())


def wheel_hashes(target: Target, version: str) -> dict[str, str]:
    """SHA-256 of every file in the wheel of `version`, from a RECORD at hand: the target's own or the installed one's.

    Empty without such a file. RECORD is written by pip from the wheel, so patching does not change it.
    """
    installed = installed_package()
    for site in [target.root, *([installed.parent] if installed else [])]:
        record = site / f"lmdeploy-{version}.dist-info" / "RECORD"
        with _named(record):
            if not record.is_file():
                continue
            with record.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.reader(file) if len(row) > 1 and row[0].startswith("lmdeploy/") and row[1]]
            if rows:  # the RECORD of an editable installation lists no files of the package
                return {row[0]: _hex(row[1]) for row in rows}
    return {}


def _hex(digest: str) -> str:
    value = digest[len("sha256=") :]
    return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()


@contextlib.contextmanager
def locked(target: Target) -> Iterator[None]:
    """One writer a tree: a second run waits for the first. The kernel drops the lock of a killed run."""
    try:
        import fcntl
    except ImportError:  # no flock on this system
        yield
        return
    with _named(target.package):
        handle = os.open(target.package, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
