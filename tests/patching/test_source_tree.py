"""The C++ halves of the series on LMDeploy's sources: they apply to the pinned text alone, and come out without a trace."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from sagellm.core.errors import PatchError
from sagellm.patching import apply, check, refresh, reverse, status
from sagellm.patching.patchset import PatchSet, default_directory, load_patchset
from sagellm.patching.tree import tree_of
from tests.patching.conftest import insert, snapshot

SUBMODULE = Path(__file__).parents[2] / "third_party" / "lmdeploy"
MANAGER = "src/turbomind/models/llama/BlockManager.cc"

pytestmark = [
    pytest.mark.source_tree,
    pytest.mark.skipif(
        not (SUBMODULE / "src").is_dir(),
        reason="no source tree: git submodule update --init third_party/lmdeploy fetches it",
    ),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without our patches: the submodule may hold them. Do not write here."""
    root = tmp_path_factory.mktemp("sources")
    for folder in ("lmdeploy", "src"):
        shutil.copytree(SUBMODULE / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    reverse(root)
    return root


@pytest.fixture
def source_tree(sources: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sources, tmp_path / "tree"))


@pytest.fixture(scope="module")
def patchset() -> PatchSet:
    return load_patchset()


def cpp(patchset: PatchSet) -> list[str]:
    return [path for path in patchset.chains if tree_of(path) == "cpp"]


def test_the_series_has_halves_for_both_engines(patchset: PatchSet) -> None:
    for patch in patchset.patches:
        trees = {tree_of(file.path) for file in patch.files}
        wanted = {"python", "cpp"} if patch.number <= "0004" else {"python"}
        assert trees == wanted, patch.name


def test_there_and_back(source_tree: Path, patchset: PatchSet) -> None:
    report = check(source_tree)
    assert report.ok and report.pending, report.problems
    before = snapshot(source_tree)
    assert apply(source_tree).state.applied
    after = snapshot(source_tree)
    assert {path for path in after if before.get(path) != after[path] and after[path]} == set(patchset.chains)
    assert status(source_tree).applied
    reverse(source_tree)
    assert snapshot(source_tree) == before


def test_git_makes_the_same_bytes(source_tree: Path, tmp_path: Path, patchset: PatchSet) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("git, the outside judge of the patch format, is not installed")
    by_git = Path(shutil.copytree(source_tree, tmp_path / "git"))
    subprocess.run([git, "init", "-q", "."], cwd=by_git, check=True)
    for patch in patchset.patches:
        options = ["--unidiff-zero", "--whitespace=nowarn", str(default_directory() / patch.name)]
        subprocess.run([git, "apply", *options], cwd=by_git, check=True)
    shutil.rmtree(by_git / ".git")
    apply(source_tree)
    assert snapshot(source_tree) == snapshot(by_git)


def test_sources_that_moved_by_a_line_are_left_alone(source_tree: Path) -> None:
    insert(source_tree, MANAGER, 0, "// one line more")
    before = snapshot(source_tree)
    report = check(source_tree)
    assert not report.ok and any(MANAGER in str(problem) for problem in report.problems)
    with pytest.raises(PatchError, match="BlockManager"):
        apply(source_tree)
    assert snapshot(source_tree) == before


def test_refreshing_from_the_patched_sources_gives_the_series_again(source_tree: Path, tmp_path: Path) -> None:
    apply(source_tree)
    patches = Path(shutil.copytree(default_directory(), tmp_path / "series"))
    assert refresh(source_tree, patches=patches).written == ()


def test_the_sources_are_those_of_the_pinned_commit(source_tree: Path, patchset: PatchSet) -> None:
    git = shutil.which("git")
    shown = git and subprocess.run(
        [git, "-C", str(SUBMODULE), "ls-tree", "-r", patchset.manifest.commit, "src"], capture_output=True, text=True
    )
    if not shown or shown.returncode != 0:
        pytest.skip("no git history of the submodule to compare with")
    blobs = dict(reversed(line.split(None, 2)[2].split("\t")) for line in shown.stdout.splitlines())
    for path in set(cpp(patchset)) & set(blobs):
        text = (source_tree / path).read_bytes()
        assert hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest() == blobs[path], path
