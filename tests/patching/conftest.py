"""Trees to patch. The upstream one is made from the installed LMDeploy, which may be patched: the tool reverses it."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from sagellm.patching import refresh, reverse
from sagellm.patching.patchset import default_directory, read_series
from sagellm.patching.tree import locate, wheel_hashes

SCHEDULER = "lmdeploy/pytorch/paging/scheduler.py"
TRIE = "lmdeploy/pytorch/paging/block_trie.py"
OURS = "lmdeploy/pytorch/sage_demo/hooks.py"
SERIES = ("0001-first.patch", "0002-second.patch", "0003-third.patch")
VERSION = "tag v0.11.0\ncommit 4abccafd45daffb330cff41b3314069ce8d7f7bd\nlicence Apache-2.0\n"


def insert(root: Path, path: str, line: int, *lines: str) -> None:
    """Insert whole lines behind line `line` of a file of the tree."""
    file = root / path
    text = file.read_bytes().split(b"\n")
    text[line:line] = [new.encode() for new in lines]
    file.write_bytes(b"\n".join(text))


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file below `root`, and every directory (as its own path with an empty text)."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b""
        for path in sorted(root.rglob("*"))
        if "__pycache__" not in path.parts
    }


def timestamps(root: Path) -> dict[str, int]:
    """Modification time of everything below `root`."""
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.rglob("*")}


@dataclass
class Lab:
    """A pristine tree, the same tree edited with markers, and the series made from the edited one."""

    pristine: Path
    edited: Path
    patches: Path


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files of LMDeploy as its wheel ships them, proven against the wheel's hashes. Do not write here."""
    spec = importlib.util.find_spec("lmdeploy")
    assert spec is not None and spec.submodule_search_locations, "the tests need LMDeploy: ./apply_patches.sh"
    root = tmp_path_factory.mktemp("upstream")
    ignored = shutil.ignore_patterns("lib", "__pycache__", "*.so")
    shutil.copytree(spec.submodule_search_locations[0], root / "lmdeploy", ignore=ignored)
    if read_series(default_directory()):
        reverse(root)
    target = locate(root)
    for name, wanted in wheel_hashes(target, "0.11.0").items():
        if name.endswith(".py") and name.startswith("lmdeploy/"):
            assert hashlib.sha256((root / name).read_bytes()).hexdigest() == wanted, f"{name} is not the wheel's"
    return root


@pytest.fixture
def tree(upstream: Path, tmp_path: Path) -> Path:
    """A pristine tree to work on."""
    return Path(shutil.copytree(upstream, tmp_path / "tree"))


def edit(root: Path) -> None:
    """The demonstration edits: three patches, files in common, an added package, an empty and a one-line place."""
    insert(root, SCHEDULER, 100, "    # third  # sage:0003")
    insert(root, SCHEDULER, 50, "    # first  # sage:0001", "    # more of it  # sage:0001", "# sage:0001")
    insert(root, SCHEDULER, 0, "import os as _sage_os  # sage:0002")
    insert(root, TRIE, 30, "# second  # sage:0002")
    insert(root, "lmdeploy/version.py", 3, "sage = 1  # sage:0003")
    ours = root / OURS
    ours.parent.mkdir()
    ours.write_text("# sage:0001 the demonstration hooks\nTABLE = {}\nLATER = 1  # sage:0003\n")
    (ours.parent / "__init__.py").write_text("# sage:0001 a package of ours\n")


@pytest.fixture(scope="session")
def series(upstream: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A small series over the real tree, made by the tool's own --refresh. Do not write here."""
    root = tmp_path_factory.mktemp("series")
    edited = Path(shutil.copytree(upstream, root / "edited"))
    edit(edited)
    (root / "third_party").mkdir()
    (root / "third_party" / "VERSION").write_text(VERSION)
    patches = root / "patches"
    patches.mkdir()
    (patches / "series").write_text("\n".join(SERIES) + "\n")
    refresh(edited, patches=patches)
    return Lab(upstream, edited, patches)


@pytest.fixture
def lab(series: Lab, tree: Path, tmp_path: Path) -> Lab:
    """The small series with a pristine tree of its own and a copy of the patches, all free to be changed."""
    shutil.copytree(series.patches.parent / "third_party", tmp_path / "third_party")
    return Lab(tree, series.edited, Path(shutil.copytree(series.patches, tmp_path / "patches")))
