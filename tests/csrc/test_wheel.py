"""Tests of the contents of a wheel of this checkout. Building a wheel needs a package index, so it is built before, and named:

python -m pip wheel . --no-deps -w dist && SAGELLM_WHEEL=$(echo dist/sagellm-*.whl) python -m pytest tests/csrc/test_wheel.py
"""

import os
import subprocess
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WHEEL = os.environ.get("SAGELLM_WHEEL")

pytestmark = pytest.mark.skipif(WHEEL is None, reason="SAGELLM_WHEEL names no wheel")


@pytest.fixture(scope="module")
def names() -> set[str]:
    with zipfile.ZipFile(WHEEL or "") as archive:
        return {name for name in archive.namelist() if not fnmatch(name, "sagellm-*.dist-info/*")}


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


def test_there_is_one_extension_and_its_stub(names: set[str]) -> None:
    assert len([name for name in names if fnmatch(name, "sagellm/_core.*.so")]) == 1
    assert not [name for name in names if name.endswith(".so") and not name.startswith("sagellm/_core.")]
    assert {"sagellm/_core.pyi", "sagellm/py.typed"} <= names


def test_every_file_of_the_package_is_there_but_the_native_sources(names: set[str]) -> None:
    wanted = {name for name in tracked("sagellm") if not name.startswith("sagellm/csrc/")}
    headers = {name.replace("sagellm/csrc/", "sagellm/") for name in tracked("sagellm/csrc/include")}
    series = {name.replace("patches/", "sagellm/patching/series/") for name in tracked("patches")}
    assert headers and series
    extension = {name for name in names if fnmatch(name, "sagellm/_core.*.so")}
    assert names - extension == wanted | headers | series
