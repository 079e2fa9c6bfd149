"""Base and head built side by side: from a clone whose set-up links to this environment and its extension, which is quick."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks import ab
from benchmarks.config import make_config
from benchmarks.errors import BenchmarkError

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the history of a git checkout"),
]
LINK = f"ln -s {sys.prefix} .venv; ln -s {ROOT}/sagellm/_core*.so sagellm/"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """`clone(script)`: a clone in whose last commit apply_patches.sh is `script`; `ab` takes it for the project."""

    def make(script: str) -> Path:
        folder = tmp_path / "clone"
        git = ["git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@localhost"]
        subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(folder)], check=True)
        (folder / "apply_patches.sh").write_text(f"#!/usr/bin/env bash\nset -e\n{script}\n")
        subprocess.run([*git, "commit", "--quiet", "--all", "--message", "Set-up without a download"], check=True)
        monkeypatch.setattr(ab, "ROOT", folder)
        return folder

    return make


def worktrees(folder: Path) -> int:
    listed = subprocess.run(["git", "-C", str(folder), "worktree", "list"], capture_output=True, text=True, check=True)
    return len(listed.stdout.splitlines())


def tiny(model: Path):
    return make_config(
        {
            "name": "tiny", "rounds": 1, "client_lag_limit": 1e6, "client_cpu_limit": 1e6, "peak_tflops": 1.0,
            "server": {"device": "cpu", "threads": 1, "kv_blocks": 64, "model": str(model)},
            "workload": {
                "arrivals": {"kind": "closed", "concurrency": 1}, "num_requests": 2, "warmup_requests": 0,
                "prompt_tokens": {"kind": "constant", "value": 20},
                # Answers too long to come in one chunk, however busy the machine: those are refused.
                "output_tokens": {"kind": "constant", "value": 64},
            },
        }
    )  # fmt: skip


@pytest.mark.slow  # three servers, one after the other
def test_base_control_and_head_are_measured(clone: Callable, model_folder: Callable, tmp_path: Path):
    folder = clone(LINK)
    result = ab.run_ab("HEAD", tiny(model_folder("llama")), tmp_path / "out")
    assert result.status == "complete", result.reason
    assert [(run.contestant, run.status, run.reason) for run in result.runs] == [
        ("base", "valid", ""), ("control", "valid", ""), ("head", "valid", ""),
    ]  # fmt: skip
    base = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    commits = result.environment["commits"]
    assert commits["base"] == commits["control"] == {"commit": base, "changed": False}
    assert commits["head"]["commit"] != base, "the head is this checkout, not the clone"
    elsewhere = result.environment["elsewhere"]
    assert elsewhere["base"]["patches"] == result.environment["patches"] and elsewhere["base"]["versions"]
    assert elsewhere.keys() == {"base", "control"}
    assert worktrees(folder) == 1


def test_what_cannot_be_compared_is_refused_before_it_is_built(clone: Callable, model_folder: Callable, tmp_path: Path):
    folder, config = clone("touch built; exit 3"), tiny(model_folder("llama"))
    with pytest.raises(BenchmarkError, match="'nothing' is no revision"):
        ab.run_ab("nothing", config, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(BenchmarkError, match="full is not empty"):
        ab.run_ab("HEAD", config, tmp_path / "full")
    assert worktrees(folder) == 1 and not (tmp_path / "out").exists()


def test_a_base_that_cannot_be_built(clone: Callable, model_folder: Callable, tmp_path: Path):
    folder = clone("echo 'no such package' >&2; exit 3")
    with pytest.raises(BenchmarkError, match="ended with code 3: no such package"):
        ab.run_ab("HEAD", tiny(model_folder("llama")), tmp_path / "out")
    assert worktrees(folder) == 1 and not (tmp_path / "out").exists()


def test_an_interrupted_build_leaves_nothing(clone: Callable, model_folder: Callable, tmp_path: Path):
    pid = tmp_path / "pid"
    folder = clone(f"sleep 600 & echo $! > {pid}.new; mv {pid}.new {pid}; wait")

    def interrupt() -> None:
        end = time.monotonic() + 60
        while not pid.exists() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            ab.run_ab("HEAD", tiny(model_folder("llama")), tmp_path / "out")
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid.read_text())).wait(10) is None, "its children are killed, too"
    assert worktrees(folder) == 1
