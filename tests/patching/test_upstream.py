"""LMDeploy's own tests on the patched LMDeploy: without plug-ins every inserted line must leave things as they are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sagellm.patching import status

ROOT = Path(__file__).parents[2]
UPSTREAM = ROOT / "third_party" / "lmdeploy" / "tests" / "pytorch"


@pytest.mark.source_tree
@pytest.mark.skipif(
    not UPSTREAM.is_dir(), reason="no source tree: git submodule update --init third_party/lmdeploy fetches it"
)
@pytest.mark.parametrize("folder", ["paging", "engine", "config"])
def test_upstream_tests_pass(tmp_path: Path, folder: str) -> None:
    assert status().applied
    # A copy, out of reach of the settings of our tests and of an lmdeploy that is not the installed one.
    shutil.copytree(UPSTREAM / folder, tmp_path / folder)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir", str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, folder],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", result.stdout), result.stdout
