"""The benchmark of the gateway runs on a few requests, and its figures belong together."""

import json
import subprocess
import sys

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.gateway import main
from benchmarks.processes import command_line, wait_until


def test_a_short_run():
    words = ["--requests", "12", "--turns", "2", "--concurrency", "3", "--tokens", "4", "--pace-ms", "2", "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found["figures"]) == {"first_token_p50_ms", "first_token_p99_ms", "last_token_p50_ms", "last_token_p99_ms"}
    for row in found["figures"].values():
        assert row["added"] == pytest.approx(row["gateway"] - row["direct"])
    assert found["figures"]["last_token_p50_ms"]["direct"] >= 3 * 2 and found["cost"]["cpu_us_a_request"] > 0


def test_the_end_of_a_benchmark_ends_its_servers():
    command = [sys.executable, "-m", "benchmarks.gateway", "--requests", "100000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        below = psutil.Process(process.pid).children

        def servers():
            return [one for one in below() if any(words in command_line(one) for words in ("main() up", "benchmarks.paced"))]

        wait_until("manager and endpoint", lambda: len(servers()) == 2)
        family = below(recursive=True)
        process.terminate()
        assert process.wait(30) != 0
    assert psutil.wait_procs(family, timeout=20)[1] == []
