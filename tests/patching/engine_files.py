"""The files that the series adds to the engine, as a compiler would find them in a patched tree. No LMDeploy is needed."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from sagellm.patching.patchset import load_patchset

SAGE = "src/turbomind/sage/"
HEADER = SAGE + "sage_hooks.h"


def engine_files() -> dict[str, bytes]:
    """The text of every file that is ours under src/turbomind/sage, by its path in the tree."""
    files: dict[str, bytes] = {}
    for patch in load_patchset().patches:
        for file in patch.files:
            if file.new and file.path.startswith(SAGE):
                files[file.path] = b"".join(line for hunk in file.hunks for line in hunk.lines)
    return files


def write_engine_files(root: Path) -> None:
    for path, text in engine_files().items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text)


def compile_cpp(source: str, folder: Path, name: str, *includes: str) -> Path:
    """A shared library of `source` and the engine's files in `folder`. Skips where there is no compiler."""
    write_engine_files(folder)
    (folder / f"{name}.cpp").write_text(source)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fPIC", "-shared"]
    command = ["g++", *flags, f"-I{folder}", *(f"-isystem{path}" for path in includes), f"{folder / name}.cpp"]
    library = folder / f"{name}{suffix}"
    try:
        done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        pytest.skip("g++ is not installed")
    assert done.returncode == 0, done.stderr
    return library
