"""Workers that are killed at random moments: no caller waits, none gets a wrong answer, and nothing is left."""

import json
import subprocess
import sys

import pytest

from benchmarks import served_kills


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_kills_under_a_server():
    command = [sys.executable, "-m", "benchmarks.worker_kills", "--server", "--kills", "3", "--seed", "3", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout)
    assert result["kills"] == 3 and not any(result[name] for name in served_kills.FAULTS)
    assert result["answers"] + result["errors"] + result["refused"] == 3 * result["clients"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_kills():
    command = [sys.executable, "-m", "benchmarks.worker_kills", "--kills", "20", "--seed", "7", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=390)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["faults"] == [] and sum(result["outcomes"].values()) == 20
    assert len(result["outcomes"]) > 1 and result["longest_to_error_s"] < 5
