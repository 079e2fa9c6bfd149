"""Killed at any point, a run leaves each file as it was or as it should be, and the next run mends the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sagellm.core.errors import PatchError
from sagellm.patching import apply
from tests.patching.conftest import OURS, SCHEDULER, Lab, snapshot

DRIVER = Path(__file__).parent / "driver.py"


def run(lab: Lab, function: str, number: int, moment: str, *verbs: str) -> subprocess.CompletedProcess[str]:
    """Run the tool so that it dies at call `number` of `os.<function>`."""
    options = [*verbs, "--target", str(lab.pristine), "--patches", str(lab.patches)]
    command = [sys.executable, str(DRIVER), function, str(number), moment, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("verb", ["apply", "reverse"])
@pytest.mark.parametrize(
    ("function", "moment"),
    [
        pytest.param("replace", "before", marks=pytest.mark.slow),
        ("replace", "after"),
        pytest.param("fsync", "before", marks=pytest.mark.slow),
    ],
)
def test_kill_at_every_step(lab: Lab, verb: str, function: str, moment: str, tmp_path: Path) -> None:
    old, new = (lab.pristine, lab.edited) if verb == "apply" else (lab.edited, lab.pristine)
    old_texts, new_texts = snapshot(old), snapshot(new)
    start = Path(shutil.copytree(old, tmp_path / "start"))
    verbs = ["--reverse"] if verb == "reverse" else []
    calls = next(
        int(line.split()[1])
        for line in run(Lab(start, start, lab.patches), function, 0, moment, *verbs).stdout.splitlines()
        if line.startswith("calls ")
    )
    assert calls == (5 if verb == "apply" else 3)
    for number in range(1, calls + 1):
        victim = Path(shutil.copytree(old, tmp_path / f"victim{number}"))
        here = Lab(victim, lab.edited, lab.patches)
        assert run(here, function, number, moment, *verbs).returncode == -9
        for name, text in snapshot(victim).items():
            if not name.endswith(".sage-tmp"):
                assert text in (old_texts.get(name), new_texts.get(name)), f"{name} is torn"
        if (victim / SCHEDULER).read_bytes() == (lab.edited / SCHEDULER).read_bytes():
            assert (victim / OURS).exists(), "an upstream file calls a module of ours that is not there"
        assert run(here, function, 0, moment, *verbs).returncode == 0
        assert snapshot(victim) == new_texts
        shutil.rmtree(victim)


@pytest.mark.parametrize("number", range(1, 6))
def test_what_a_killed_run_left_behind_goes_when_the_next_one_turns_back(lab: Lab, number: int) -> None:
    before = snapshot(lab.pristine)
    assert run(lab, "replace", number, "before").returncode == -9
    assert snapshot(lab.pristine) != before
    assert run(lab, "replace", 0, "before", "--reverse").returncode == 0
    assert snapshot(lab.pristine) == before


@pytest.mark.parametrize("number", [1, 2])
def test_kill_while_files_are_removed(lab: Lab, number: int, tmp_path: Path) -> None:
    victim = Path(shutil.copytree(lab.edited, tmp_path / "victim"))
    here = Lab(victim, lab.edited, lab.patches)
    assert run(here, "unlink", number, "before", "--reverse").returncode == -9
    assert run(here, "unlink", 0, "before", "--reverse").returncode == 0
    assert snapshot(victim) == snapshot(lab.pristine)


def test_the_tree_is_locked_while_it_is_written(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    replace, refused = os.replace, []

    def probe(source: Path, target: Path) -> None:
        other = os.open(lab.pristine / "lmdeploy", os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refused.append(target)
        finally:
            os.close(other)
        replace(source, target)

    monkeypatch.setattr(os, "replace", probe)
    assert len(apply(lab.pristine, patches=lab.patches).written) == len(refused)


def test_a_write_that_fails_leaves_the_tree_mendable(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, done = os.replace, []

    def full(source: Path, target: Path) -> None:
        if len(done) == 2:
            raise OSError(28, "No space left on device", str(target))
        done.append(replace(source, target))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PatchError, match="No space left on device"):
        apply(lab.pristine, patches=lab.patches)
    monkeypatch.undo()
    apply(lab.pristine, patches=lab.patches)
    assert snapshot(lab.pristine) == snapshot(lab.edited)
