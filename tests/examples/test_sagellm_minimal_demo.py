"""The example runs as it stands, on a tiny model."""

import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_answers_and_leaves_nothing(model_folder):
    folder = model_folder("llama")
    words = ["--model", str(folder), "--device", "cpu", "--threads", "1", "--max-tokens", "8"]
    done = subprocess.run(
        [sys.executable, "examples/sagellm_minimal_demo.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert re.fullmatch(rf"{folder.name} on cpu after [\d.]+ s, behind http://127\.0\.0\.1:\d+/v1", first)
    times = re.fullmatch(r"TTFT ([\d.]+) ms, TPOT ([\d.]+) ms, (\d+) pieces", last)
    assert float(times[1]) > 0 and float(times[2]) > 0 and 2 <= int(times[3]) <= 8
    left = [one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or ())]
    assert not left
