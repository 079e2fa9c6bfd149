"""The kit for a GPU, as far as a machine without one can run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.gpu import kit
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.report import markdown
from sagellm.cli.checks import NOTE, OK, gpu_runs

PLACE = {"device": "cpu", "model": Path("/nowhere"), "stock": Path("/nowhere")}


@pytest.mark.slow
def test_a_part_that_fails_is_a_finding():
    found = kit.run_part("faults", **PLACE, limit_s=60)
    assert kit.state(found) == "broken" and found["error"] == "exit code 1" and "nowhere" in found["log"]


def test_a_part_that_takes_too_long_is_ended():
    found = kit.run_part("faults", **PLACE, limit_s=0)
    assert kit.state(found) == "broken" and found["error"] == "no result in time" and found["seconds"] < 30


def test_unknown_parts_are_refused(tmp_path: Path):
    words = ["--model", tmp_path, "--stock", tmp_path, "--out", tmp_path, "--parts", "hooks,nothing"]
    done = CliRunner().invoke(kit.main, list(map(str, words)))
    assert done.exit_code == 2 and "unknown part 'nothing'; allowed are quantized, answers" in done.output


def run_of(**parts: dict) -> dict:
    versions = {"torch": "2.11.0", "sagellm": None}
    machine = {"processor": "a processor", "commit": "abc1234", "python": "3.12.3", "versions": versions}
    device = {"name": "cuda", "model": "NVIDIA H100", "copy_gb_s": 3012.5}
    return {"date": "2026-01-02", "machine": machine, "device": device, "parts": parts}


PASSED = {"seconds": 3.0, "checks": {"all is well": True}, "figures": {"a": {"median": 1.0, "low": 0.9, "high": 1.1}, "b": {}}}
FAILED = {"seconds": 3.0, "checks": {"all is well": False}, "figures": {}}
BROKEN = {"seconds": 3.0, "error": "exit code 1", "log": "Traceback\nKeyError: 7"}


def test_the_page_shows_every_part():
    page = markdown(run_of(hooks=PASSED, replay=FAILED, tiers=BROKEN))
    for line in (
        "# NVIDIA H100, 2026-01-02", "Revision abc1234; Python 3.12.3; torch 2.11.0.", "| copy_gb_s | 3012 |",
        "| all is well | yes |", "| a | 1 (0.9 to 1.1) |", "| all is well | **no** |", "Broken: exit code 1, after 3 s.",
        "KeyError: 7",
    ):  # fmt: skip
        assert line in page.splitlines(), line


def test_doctor_lists_committed_runs_and_nothing_else(tmp_path: Path):
    (none,) = gpu_runs(tmp_path)
    assert none.state == NOTE and none.text == "no GPU has run the kit of benchmarks/gpu so far"
    (tmp_path / "gpu_a.json").write_text(json.dumps(run_of(hooks=PASSED)))
    (tmp_path / "gpu_b.json").write_text(json.dumps(run_of(hooks=PASSED, replay=FAILED, tiers=BROKEN)))
    good, bad = gpu_runs(tmp_path)
    assert good.state == OK and good.text == "NVIDIA H100 on 2026-01-02, revision abc1234: 1 of 1 parts passed"
    assert bad.state == NOTE and bad.text.endswith("1 of 3 parts passed; not replay, tiers")


@pytest.mark.slow
def test_a_bundle_proves_itself_on_the_cpu(tmp_path: Path):
    """Made for this Python, set up in a folder of its own without an index, and run as on a GPU."""
    bundle, out = tmp_path / "bundle", tmp_path / "out"
    version = ".".join(map(str, sys.version_info[:2]))
    subprocess.run([sys.executable, "-m", "benchmarks.gpu.bundle", "--out", bundle, "--python", version], check=True)
    done = subprocess.run(
        [sys.executable, bundle / "start.py", "--out", out, "--device", "cpu", "--minutes", "13"],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    run = json.loads((out / "device.json").read_text())
    assert run["parts"].keys() == PARTS.keys()
    assert all(kit.state(found) == "passed" for found in run["parts"].values())
    assert run["parts"]["eagle3"]["figures"] == {"left_out": "LMDeploy's EAGLE-3 needs a GPU"}
    assert (out / "device.md").read_text().startswith("# ")
