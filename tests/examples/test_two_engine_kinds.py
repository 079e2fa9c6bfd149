"""The example runs as it stands, on a tiny model, and leaves nothing."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_both_answer_and_one_goes_on_alone(model_folder):
    folder = model_folder("llama")
    words = ["--model", str(folder), "--device", "cpu", "--requests", "4"]
    done = subprocess.run(
        [sys.executable, "examples/two_engine_kinds.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["both: own answered 2, server answered 2", "server drained: own answered 4"]
    left = [one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or ())]
    assert not left
