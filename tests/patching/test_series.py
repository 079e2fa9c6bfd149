"""The series this project ships, on the LMDeploy that is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sagellm.patching import apply, check, default_target, refresh, reverse, status
from sagellm.patching.markers import comment_mark, marker_of, owner_of
from sagellm.patching.patchset import PatchSet, default_directory, load_patchset, read_series
from tests.patching.conftest import snapshot, timestamps

PATCHES = default_directory()
NAMES = read_series(PATCHES)
pytestmark = pytest.mark.skipif(not NAMES, reason="patches/series lists no patch")


@pytest.fixture(scope="module")
def patchset() -> PatchSet:
    """The series with its manifest."""
    return load_patchset()


def test_the_installed_tree_is_patched() -> None:
    state = status()
    assert state.applied, f"{state.reason}; run: {state.command}"


def test_it_is_made_for_the_pinned_version(patchset: PatchSet) -> None:
    pin = dict(line.split(maxsplit=1) for line in (PATCHES.parent / "third_party/VERSION").read_text().splitlines())
    assert (f"v{patchset.manifest.version}", patchset.manifest.commit) == (pin["tag"], pin["commit"])


def test_it_would_apply_and_no_two_patches_meet(tree: Path) -> None:
    report = check(tree)
    assert report.ok, report.problems
    assert report.pending


def test_there_and_back(tree: Path) -> None:
    before = snapshot(tree)
    assert apply(tree).state.applied
    after = timestamps(tree)
    assert apply(tree).written == () and timestamps(tree) == after
    assert reverse(tree).state.state == "not applied"
    assert snapshot(tree) == before


def test_it_makes_the_installed_tree(tree: Path) -> None:
    apply(tree)
    for path, text in snapshot(tree / "lmdeploy").items():
        installed = default_target() / path
        assert installed.is_dir() or installed.read_bytes() == text, path


def test_patched_python_files_compile(tree: Path, patchset: PatchSet) -> None:
    apply(tree)
    for path in patchset.chains:
        if path.endswith(".py"):
            compile((tree / path).read_bytes(), path, "exec")


def test_git_applies_it_to_the_same_bytes(tree: Path, tmp_path: Path, patchset: PatchSet) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("git, the outside judge of the patch format, is not installed")
    by_git = Path(shutil.copytree(tree, tmp_path / "git"))
    subprocess.run([git, "init", "-q", "."], cwd=by_git, check=True)
    sources = ["--include=lmdeploy/*"]  # the wheel has no C++ sources
    for name in NAMES:
        options = ["--unidiff-zero", "--whitespace=nowarn", *sources, str(PATCHES / name)]
        subprocess.run([git, "apply", *options], cwd=by_git, check=True)
    shutil.rmtree(by_git / ".git")
    apply(tree)
    assert snapshot(tree) == snapshot(by_git)


def test_refreshing_from_the_patched_tree_gives_the_series_again(tree: Path, tmp_path: Path) -> None:
    apply(tree)
    patches = Path(shutil.copytree(PATCHES, tmp_path / "series"))
    report = refresh(tree, patches=patches)
    assert report.written == ()


def test_every_inserted_line_is_marked_and_every_patch_says_why(patchset: PatchSet) -> None:
    for patch in patchset.patches:
        assert len(patch.header.split()) > 10 and "(the door this patch opens)" not in patch.header, patch.name
        for file in patch.files:
            for hunk in file.hunks:
                if file.new:
                    assert owner_of(hunk.lines[0], file.path) == patch.number
                    continue
                for line in hunk.lines:
                    assert marker_of(line, file.path) == patch.number, (patch.name, line)
                    assert comment_mark(file.path) in line


def test_no_patch_quotes_upstream() -> None:
    for name in NAMES:
        body = (PATCHES / name).read_text().split("\n--- ", 1)[1]
        assert all(line.startswith(("+", "@@ -", "--- ", "a/", "/dev/null")) for line in body.splitlines()), name
