"""The benchmark of the gateway runs on a few requests, and its figures belong together."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.gateway import main


def test_a_short_run():
    words = ["--requests", "12", "--turns", "2", "--concurrency", "3", "--tokens", "4", "--pace-ms", "2", "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found["figures"]) == {"first_token_p50_ms", "first_token_p99_ms", "last_token_p50_ms", "last_token_p99_ms"}
    for row in found["figures"].values():
        assert row["added"] == pytest.approx(row["gateway"] - row["direct"])
    assert found["figures"]["last_token_p50_ms"]["direct"] >= 3 * 2 and found["cost"]["cpu_us_a_request"] > 0
