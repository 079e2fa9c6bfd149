"""The benchmark of routers runs on a short trace, and no router finds more than one cache of all engines would hold."""

import json

from click.testing import CliRunner

from benchmarks.routing import main


def test_a_short_run():
    words = ["--trace", "conversation:requests=400,seed=1", "--many", "20", "--decisions", "50", "--rounds", "2", "--json"]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    rates = {name: row["hit_rate"] for name, row in found["figures"].items()}
    assert 0 < rates["round-robin"] < rates["prefix"] <= rates["one cache of all"] < 1
    assert all(0 < row["ttft_p50_s"] <= row["ttft_p95_s"] for row in found["figures"].values())
    assert all(0 < row["median_us"]["low"] <= row["p99_us"]["high"] for row in found["decisions"].values())
