"""Making patches from an edited tree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sagellm.core.errors import PatchError
from sagellm.patching import apply, check, refresh
from sagellm.patching.diff import format_patch, parse_patch
from sagellm.patching.recipe import build_recipes
from tests.patching.conftest import OURS, SCHEDULER, SERIES, TRIE, Lab, insert, snapshot, timestamps

CPP = "src/turbomind/engine/demo.cc"


@pytest.fixture
def edited(lab: Lab, tmp_path: Path) -> Path:
    """The edited tree, free to be changed."""
    return Path(shutil.copytree(lab.edited, tmp_path / "edited"))


def test_patches_quote_nothing_of_upstream(series: Lab) -> None:
    for name in SERIES:
        for line in (series.patches / name).read_text().splitlines():
            assert not line.startswith("-") or line.startswith("--- ")
            assert not line.startswith(" ")


def test_refreshing_again_changes_nothing(lab: Lab) -> None:
    before = timestamps(lab.patches)
    assert refresh(lab.edited, patches=lab.patches).written == ()
    assert timestamps(lab.patches) == before


def test_the_header_survives(lab: Lab, edited: Path) -> None:
    patch = lab.patches / SERIES[1]
    header, rest = patch.read_text().split("\n\n--- ", 1)
    assert "Opens:" in header
    patch.write_text("A title\n\nWhy it is there,\n  in two lines: @@ -1 +1 @@\n--- a rule\n\n--- " + rest)
    insert(edited, TRIE, 30, "# and again  # sage:0002")
    refresh(edited, patches=lab.patches)
    text = patch.read_text()
    assert text.startswith("A title\n\nWhy it is there,\n  in two lines: @@ -1 +1 @@\n--- a rule\n\n--- a/")
    assert "+# and again  # sage:0002" in text


def test_only_the_patches_asked_for_change(lab: Lab, edited: Path) -> None:
    insert(edited, SCHEDULER, 20, "# early  # sage:0001")
    insert(edited, SCHEDULER, 300, "# late  # sage:0003")
    report = refresh(edited, ("0001",), patches=lab.patches)
    assert any("0003" in note for note in report.notes)
    assert "# late" not in (lab.patches / SERIES[2]).read_text()
    apply(lab.pristine, patches=lab.patches)
    text = (lab.pristine / SCHEDULER).read_text()
    assert "# early  # sage:0001" in text and "# late" not in text and "# third  # sage:0003" in text
    assert check(lab.pristine, patches=lab.patches).ok


def test_a_tree_with_one_patch_merges_into_the_series(lab: Lab, tree: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(tree, tmp_path / "alone"))
    insert(alone, TRIE, 60, "# one developer  # sage:0003")
    refresh(alone, ("0003",), patches=lab.patches)
    apply(lab.pristine, patches=lab.patches)
    assert "# one developer" in (lab.pristine / TRIE).read_text() and "# second" in (lab.pristine / TRIE).read_text()
    assert (
        "# third" not in (lab.pristine / SCHEDULER).read_text() and "# first" in (lab.pristine / SCHEDULER).read_text()
    )


def test_our_file_that_is_gone_from_the_tree_leaves_the_series(lab: Lab, edited: Path) -> None:
    shutil.rmtree((edited / OURS).parent)
    refresh(edited, patches=lab.patches)
    apply(lab.pristine, patches=lab.patches)
    assert snapshot(lab.pristine) == snapshot(edited)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace("class Scheduler", "class Scheduled", 1), "unmarked lines"),
        (lambda text: text + "x = 1\n", "unmarked lines"),
        (lambda text: text + "x = 1  # sage:0008\n", "0008"),
        (lambda text: text + "x = 1  # sage:0001", "newline"),
    ],
)
def test_what_is_not_an_insertion_is_refused(lab: Lab, edited: Path, damage, message: str) -> None:
    (edited / SCHEDULER).write_text(damage((edited / SCHEDULER).read_text()))
    before = snapshot(lab.patches)
    with pytest.raises(PatchError, match=message):
        refresh(edited, patches=lab.patches)
    assert snapshot(lab.patches) == before


def test_a_newly_touched_file_is_compared_with_the_wheel(lab: Lab, edited: Path) -> None:
    insert(edited, "lmdeploy/messages.py", 20, "import this  # sage:0001", "import that")
    with pytest.raises(PatchError, match=r"messages\.py: its unmarked lines"):
        refresh(edited, patches=lab.patches)
    (edited / "lmdeploy/not_upstream.py").write_text("x = 1  # sage:0001\n")
    (edited / "lmdeploy/messages.py").write_bytes((lab.pristine / "lmdeploy/messages.py").read_bytes())
    with pytest.raises(PatchError, match=r"not_upstream\.py is not LMDeploy's"):
        refresh(edited, patches=lab.patches)


def test_two_patches_at_one_place_are_refused(lab: Lab, edited: Path) -> None:
    insert(edited, SCHEDULER, 51, "# wants the same place  # sage:0003")
    with pytest.raises(PatchError, match="0001 and 0003 both insert behind line 50"):
        refresh(edited, patches=lab.patches)


def test_check_finds_two_patches_at_one_place(lab: Lab) -> None:
    files = [parse_patch(name, (lab.patches / name).read_bytes()) for name in SERIES]
    _, problems = build_recipes(files)
    assert not problems
    text = (lab.patches / SERIES[2]).read_text()
    assert "@@ -104,0 +105,1 @@" in text  # behind upstream line 100, four lines of the others above it
    for place in range(51, 55):  # upstream line 50 is line 51 by then, and three lines of 0001 follow it
        (lab.patches / SERIES[2]).write_text(text.replace("@@ -104,0 +105,1 @@", f"@@ -{place},0 +{place + 1},1 @@"))
        report = check(lab.pristine, patches=lab.patches)
        assert any("0001 and 0003 both insert behind line 50" in problem for problem in report.problems)
        with pytest.raises(PatchError, match="0001 and 0003"):
            apply(lab.pristine, patches=lab.patches)
    for place in (50, 55):
        (lab.patches / SERIES[2]).write_text(text.replace("@@ -104,0 +105,1 @@", f"@@ -{place},0 +{place + 1},1 @@"))
        assert not any("both insert" in problem for problem in check(lab.pristine, patches=lab.patches).problems)


def test_both_trees_in_one_series(lab: Lab, edited: Path) -> None:
    (edited / CPP).parent.mkdir(parents=True)
    (edited / CPP).write_text("int a;\nint b;\n")
    upstream = Path(shutil.copytree(edited, edited.parent / "sources"))
    insert(edited, CPP, 1, "int hook;  // sage:0002", "// sage:0002")
    header = edited / "src/turbomind/engine/demo_hooks.h"
    header.write_text("// sage:0002 ours\n#pragma once  // not # sage:0003\n")
    assert any(CPP in note for note in refresh(edited, patches=lab.patches).notes)
    before = snapshot(lab.patches)
    refresh(lab.edited, patches=lab.patches)  # a tree without sources says nothing about them
    assert snapshot(lab.patches) == before
    wheel = apply(lab.pristine, patches=lab.patches)
    assert wheel.state.applied and not (lab.pristine / "src").exists()
    apply(upstream, patches=lab.patches)
    assert snapshot(upstream) == snapshot(edited)


def test_patch_text_round_trips(series: Lab) -> None:
    for name in SERIES:
        data = (series.patches / name).read_bytes()
        assert format_patch(parse_patch(name, data)) == data


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("+    # first", "     # first"),
        ("+    # first", "-    # first"),
        ("+51,3 @@", "+51,4 @@"),
        (",0 +51,3", ",1 +51,3"),
        ("+51,3", "+52,3"),
        ("+++ b/lmdeploy/pytorch/paging/scheduler.py", "+++ b/lmdeploy/../scheduler.py"),
    ],
)
def test_a_patch_that_does_more_than_insert_is_refused(lab: Lab, old: str, new: str) -> None:
    patch = lab.patches / SERIES[0]
    assert old in patch.read_text()
    patch.write_text(patch.read_text().replace(old, new))
    with pytest.raises(PatchError, match=SERIES[0]):
        apply(lab.pristine, patches=lab.patches)
