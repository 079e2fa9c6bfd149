"""The benchmark of plans runs on a tiny model, and its figures belong together."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.sla_plan import COMPARED, main


def test_a_short_run(model_folder, tmp_path):
    words = ["--model", model_folder("llama"), "--profile", tmp_path / "p.json", "--out", tmp_path / "result.json"]
    words += ["--concurrency", "1,2", "--profile-tokens", "8,16,24", "--prompt-tokens", 16, "--output-tokens", 4]
    words += ["--ttft-ms", 60000, "--itl-ms", 60000, "--seconds", 1, "--scales", "0.05"]
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "result.json").read_text())
    (load,) = found["loads"].values()
    assert load["requests"] >= 2 and found["plan"]["fleet"]["devices"] == 1
    for name in COMPARED:
        figure = load[name]
        assert figure["measured"] > 0 and figure["error"] == pytest.approx(figure["predicted"] / figure["measured"] - 1)
    assert load["share_in_time"] == {"predicted": 1.0, "measured": 1.0, "error": 0.0}
    assert found["profile_errors"]["tensor_parallel 1, lookahead 0"]["decode"]["num_held_out"] == 6
