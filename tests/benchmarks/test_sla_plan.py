"""The benchmark of plans runs on a tiny model, and its figures belong together."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.sla_plan import COMPARED, WAYS, main


def test_a_short_run(model_folder, tmp_path):
    words = ["--model", model_folder("llama"), "--profile", tmp_path / "p.json", "--out", tmp_path / "result.json"]
    words += ["--concurrency", "1,2", "--profile-tokens", "8,16,24", "--prompt-tokens", 16, "--output-tokens", 4]
    words += ["--ttft-ms", 60000, "--itl-ms", 60000, "--seconds", 1, "--scales", "0.05", "--rounds", 1]
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "result.json").read_text())
    (load,) = found["loads"].values()
    assert load["requests"] >= 2 and found["plan"]["fleet"]["devices"] == 1
    (run,) = load["runs"]
    for way in WAYS:
        for name in COMPARED:
            figure = run[way][name]
            assert figure["measured"] > 0 and figure["error"] == pytest.approx(figure["predicted"] / figure["measured"] - 1)
            assert load["errors"][way][name] == pytest.approx(figure["error"])
        assert run[way]["share_in_time"] == {"predicted": 1.0, "measured": 1.0, "error": 0.0}
    assert run["slowdown"] > 0 and found["profile_slowdown"] >= 1
    assert found["profile_errors"]["tensor_parallel 1, lookahead 0"]["decode"]["num_held_out"] == 6
