"""Applying and reversing, on real LMDeploy files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from sagellm.core.errors import PatchError
from sagellm.patching import apply, check, reverse, status
from sagellm.patching.manifest import sha256
from tests.patching.conftest import OURS, SCHEDULER, SERIES, TRIE, Lab, insert, snapshot, timestamps


def test_apply_gives_the_edited_tree(lab: Lab) -> None:
    outcome = apply(lab.pristine, patches=lab.patches)
    assert snapshot(lab.pristine) == snapshot(lab.edited)
    assert outcome.state.applied and len(outcome.written) == 5


def test_git_applies_the_patches_to_the_same_bytes(lab: Lab) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("git, the outside judge of the patch format, is not installed")
    subprocess.run([git, "init", "-q", "."], cwd=lab.pristine, check=True)  # or it would look for a repository above
    for name in SERIES:
        command = [git, "apply", "--unidiff-zero", "--whitespace=nowarn", str(lab.patches / name)]
        subprocess.run(command, cwd=lab.pristine, check=True)
    shutil.rmtree(lab.pristine / ".git")
    assert snapshot(lab.pristine) == snapshot(lab.edited)


def test_a_second_run_touches_nothing(lab: Lab) -> None:
    apply(lab.pristine, patches=lab.patches)
    before = timestamps(lab.pristine)
    outcome = apply(lab.pristine, patches=lab.patches)
    assert outcome.written == () and timestamps(lab.pristine) == before


def test_reverse_restores_every_byte_and_leaves_no_directory(lab: Lab) -> None:
    before = snapshot(lab.pristine)
    apply(lab.pristine, patches=lab.patches)
    cache = (lab.pristine / OURS).parent / "__pycache__"
    cache.mkdir()
    (cache / "hooks.cpython-311.pyc").write_bytes(b"compiled")
    outcome = reverse(lab.pristine, patches=lab.patches)
    assert snapshot(lab.pristine) == before and OURS in outcome.removed
    assert not (lab.pristine / OURS).parent.exists()
    assert outcome.state.state == "not applied"
    untouched = timestamps(lab.pristine)
    assert reverse(lab.pristine, patches=lab.patches).removed == () and timestamps(lab.pristine) == untouched


@pytest.mark.parametrize("form", ["repository", "package", "renamed package"])
def test_a_target_may_be_named_in_several_ways(lab: Lab, form: str) -> None:
    target = {"repository": lab.pristine, "package": lab.pristine / "lmdeploy"}.get(form)
    if target is None:
        target = (lab.pristine / "lmdeploy").rename(lab.pristine / "a_copy")
    assert apply(target, patches=lab.patches).state.applied
    assert reverse(target, patches=lab.patches).state.state == "not applied"


def test_permissions_survive_and_hard_links_are_not_written_through(lab: Lab) -> None:
    file = lab.pristine / SCHEDULER
    file.chmod(0o640)
    cached = lab.pristine.parent / "cached.py"
    os.link(file, cached)
    text = cached.read_bytes()
    apply(lab.pristine, patches=lab.patches)
    assert file.stat().st_mode & 0o777 == 0o640 and cached.read_bytes() == text != file.read_bytes()
    assert (lab.pristine / OURS).stat().st_mode == (lab.pristine / "lmdeploy/version.py").stat().st_mode


@pytest.mark.parametrize("work", [apply, reverse])
def test_a_file_of_unknown_origin_is_named_with_hashes_and_left_alone(lab: Lab, work) -> None:
    if work is reverse:
        apply(lab.pristine, patches=lab.patches)
    states = {state.chain.path: state for state in status(lab.pristine, patches=lab.patches).files}
    insert(lab.pristine, TRIE, 3, "something = 'of the user'")
    text = (lab.pristine / TRIE).read_bytes()
    before = timestamps(lab.pristine)
    for force in (False, True):
        with pytest.raises(PatchError) as refusal:
            work(lab.pristine, patches=lab.patches, force=force)
        for part in (TRIE, sha256(text), *states[TRIE].ends):
            assert part in str(refusal.value)
        assert SCHEDULER not in str(refusal.value)
    assert timestamps(lab.pristine) == before
    state = status(lab.pristine, patches=lab.patches)
    assert state.state == "foreign" and [p.state == "foreign" for p in state.patches] == [False, True, False]


def test_a_shifted_file_is_refused(lab: Lab) -> None:
    insert(lab.pristine, SCHEDULER, 0, "# one", "# two", "# three")
    before = snapshot(lab.pristine)
    with pytest.raises(PatchError, match="nothing was written"):
        apply(lab.pristine, patches=lab.patches)
    assert not check(lab.pristine, patches=lab.patches).ok
    assert snapshot(lab.pristine) == before


def test_a_missing_file_and_a_file_in_the_way_are_refused(lab: Lab) -> None:
    (lab.pristine / TRIE).unlink()
    (lab.pristine / OURS).parent.mkdir()
    (lab.pristine / OURS).write_text("already = 'there'\n")
    with pytest.raises(PatchError) as refusal:
        apply(lab.pristine, patches=lab.patches)
    assert TRIE in str(refusal.value) and OURS in str(refusal.value) and "nothing there" in str(refusal.value)
    assert (lab.pristine / OURS).read_text() == "already = 'there'\n"


def test_another_version_is_refused_with_found_and_wanted(lab: Lab) -> None:
    file = lab.pristine / "lmdeploy/version.py"
    file.write_text(file.read_text().replace("0.11.0", "0.11.1"))
    before = snapshot(lab.pristine)
    for work in (apply, reverse):
        with pytest.raises(PatchError, match=r"LMDeploy 0\.11\.1.*0\.11\.0"):
            work(lab.pristine, patches=lab.patches)
    state = status(lab.pristine, patches=lab.patches)
    assert state.state == "foreign" and "0.11.1" in state.reason and "0.11.0" in state.command
    assert snapshot(lab.pristine) == before


@pytest.mark.parametrize("work", [apply, reverse])
def test_a_half_patched_tree_is_recognised_and_mended(lab: Lab, work) -> None:
    wanted = snapshot(lab.edited) if work is apply else snapshot(lab.pristine)
    shutil.copy(lab.edited / SCHEDULER, lab.pristine / SCHEDULER)
    state = status(lab.pristine, patches=lab.patches)
    assert state.state == "partial" and TRIE in state.reason and "sagellm.patching" in state.command
    assert [patch.state for patch in state.patches] == ["partial"] * 3
    work(lab.pristine, patches=lab.patches)
    assert snapshot(lab.pristine) == wanted


def test_a_file_with_only_the_first_patches_is_brought_forward(lab: Lab) -> None:
    text = (lab.edited / SCHEDULER).read_text().splitlines(keepends=True)
    (lab.pristine / SCHEDULER).write_text("".join(line for line in text if "sage:0003" not in line))
    scheduler = next(f for f in status(lab.pristine, patches=lab.patches).files if f.chain.path == SCHEDULER)
    assert scheduler.position == 2
    apply(lab.pristine, patches=lab.patches)
    assert snapshot(lab.pristine) == snapshot(lab.edited)


def test_force_takes_edited_marked_lines_and_nothing_else(lab: Lab) -> None:
    pristine = snapshot(lab.pristine)
    apply(lab.pristine, patches=lab.patches)
    file = lab.pristine / SCHEDULER
    file.write_text(file.read_text().replace("# first  #", "# of an older series  #"))
    stray = lab.pristine / "lmdeploy/pytorch/older/sage_old.py"
    stray.parent.mkdir()
    stray.write_text("# sage:0009 of an older series\n")
    with pytest.raises(PatchError, match="--force") as refusal:
        apply(lab.pristine, patches=lab.patches)
    assert "sage_old.py" in str(refusal.value) and "of an older series" in file.read_text()
    apply(lab.pristine, patches=lab.patches, force=True)
    assert snapshot(lab.pristine) == snapshot(lab.edited)
    file.write_text(file.read_text().replace("# first  #", "# of an older series  #"))
    reverse(lab.pristine, patches=lab.patches, force=True)
    assert snapshot(lab.pristine) == pristine


def test_a_damaged_patch_file_is_found_before_anything_is_written(lab: Lab) -> None:
    patch = lab.patches / SERIES[0]
    patch.write_text(patch.read_text().replace("# more of it  #", "# more of that  #"))
    before = snapshot(lab.pristine)
    with pytest.raises(PatchError, match="Nothing was written"):
        apply(lab.pristine, patches=lab.patches)
    assert snapshot(lab.pristine) == before
    report = check(lab.pristine, patches=lab.patches)
    assert not report.ok and SCHEDULER in report.problems[0]


def test_two_runs_at_once_end_in_the_same_tree(lab: Lab) -> None:
    command = [sys.executable, "-m", "sagellm.patching", "--target", str(lab.pristine), "--patches", str(lab.patches)]
    runs = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(4)]
    assert [run.wait(60) for run in runs] == [0] * 4
    assert snapshot(lab.pristine) == snapshot(lab.edited)
