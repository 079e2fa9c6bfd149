"""The command line, run as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patching.conftest import SERIES, Lab, insert, snapshot

ROOT = Path(__file__).parents[2]


def tool(*arguments: object, isolated: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the tool; `isolated` leaves it the standard library and nothing of this environment."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from sagellm.patching.cli import main; sys.exit(main())"
    command = [sys.executable, "-I", "-S", "-c", start] if isolated else [sys.executable, "-m", "sagellm.patching"]
    return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=60)


def options(lab: Lab) -> list[object]:
    """The tree and the series of the test."""
    return ["--target", lab.pristine, "--patches", lab.patches]


def test_the_life_of_a_tree_with_the_standard_library_alone(lab: Lab) -> None:
    before = snapshot(lab.pristine)
    steps = [
        (["--check"], 0, "applies"),
        (["--status"], 1, "not applied"),
        ([], 0, "applied"),
        (["--status"], 0, "applied"),
        ([], 0, "nothing to do"),
        (["--reverse"], 0, "not applied"),
    ]
    for verb, code, words in steps:
        result = tool(*verb, *options(lab), isolated=True)
        assert (result.returncode, result.stderr) == (code, ""), result
        assert words in result.stdout
    assert snapshot(lab.pristine) == before


def test_status_json(lab: Lab) -> None:
    result = tool("--status", "--json", *options(lab))
    document = json.loads(result.stdout)
    assert result.returncode == 1 and document["state"] == "not applied"
    (target,) = document["targets"]
    assert [patch["patch"] for patch in target["patches"]] == list(SERIES)
    assert {patch["state"] for patch in target["patches"]} == {"not applied"}
    assert str(lab.pristine) in target["command"]
    document = json.loads(tool("--json", *options(lab)).stdout)
    assert document["state"] == "applied" and len(document["targets"][0]["written"]) == 5


def test_every_tree_is_checked_before_any_is_written(lab: Lab, tmp_path: Path) -> None:
    import shutil

    other = Path(shutil.copytree(lab.pristine, tmp_path / "other"))
    insert(other, "lmdeploy/version.py", 0, "# a line of the user")
    before = snapshot(lab.pristine)
    result = tool(*options(lab), "--target", other)
    assert result.returncode == 1 and "version.py" in result.stderr and snapshot(lab.pristine) == before
    document = json.loads(tool("--status", "--json", *options(lab), "--target", other).stdout)
    assert document["state"] == "foreign" and [t["state"] for t in document["targets"]] == ["not applied", "foreign"]


def test_errors_in_json_are_json(lab: Lab) -> None:
    insert(lab.pristine, "lmdeploy/version.py", 0, "# a line of the user")
    result = tool("--json", *options(lab))
    assert result.returncode == 1 and "version.py" in json.loads(result.stdout)["error"]


def test_misuse(lab: Lab, tmp_path: Path) -> None:
    assert tool("--status", "--reverse").returncode == 2
    assert tool("--refresh", "1", *options(lab)).returncode == 2
    assert tool("--status", "--target", tmp_path / "nowhere").returncode == 2
    result = tool("--status", "--target", tmp_path)
    assert result.returncode == 1 and "no LMDeploy" in result.stderr
    result = tool("--refresh", "0009", *options(lab))
    assert result.returncode == 1 and "0001, 0002, 0003" in result.stderr


def test_refresh_from_the_command_line(lab: Lab) -> None:
    (lab.patches / "manifest.json").unlink()
    result = tool("--refresh", "--target", lab.edited, "--patches", lab.patches)
    assert result.returncode == 0 and "wrote manifest.json" in result.stdout
    result = tool("--refresh", "--target", lab.edited, "--patches", lab.patches)
    assert result.returncode == 0 and "up to date" in result.stdout


@pytest.mark.parametrize("name", ["version.py", "pytorch/paging/scheduler.py"])
@pytest.mark.parametrize("defect", ["a directory", "not UTF-8", "not readable"])
def test_files_that_cannot_be_read_are_named(lab: Lab, name: str, defect: str) -> None:
    file = lab.pristine / "lmdeploy" / name
    if defect == "not UTF-8":
        file.write_bytes(b"\xff\xfe")
    else:
        file.unlink()
        # A link to itself cannot be read by anybody; root could read a file without permissions.
        file.mkdir() if defect == "a directory" else file.symlink_to(file)
    for verb in ("--status", "--check", "--reverse", "--force"):
        result = tool(verb, *options(lab))
        assert result.returncode == 1 and "Traceback" not in result.stderr, result
        assert file.name in result.stdout + result.stderr
