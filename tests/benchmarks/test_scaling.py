"""The benchmark of scaled fleets runs on a short load, and its figures belong together."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.scaling import main


def test_a_short_run(tmp_path):
    words = ["--minutes", 1, "--steps", "1,4,1", "--rate", 1, "--also", "", "--output-tokens", 16, "--cooldown-s", 5]
    done = CliRunner().invoke(main, [*map(str, words), "--down-after", "1", "--out", str(tmp_path / "result.json")])
    assert done.exit_code == 0, done.output
    (load,) = json.loads((tmp_path / "result.json").read_text())["loads"].values()
    assert load["requests"] > 60 and load["scaled"]["changes"] == len(load["scaled"]["at"]) > 0
    sizes = {round(each["engines"]) for each in load["fixed"].values()}
    assert sizes == {1, 2} and min(sizes) <= load["scaled"]["engines"] <= max(sizes)
    fixed = [(round(each["engines"]), each["goodput_rps"]) for each in load["fixed"].values()]
    low, high = (max(goodput for engines, goodput in fixed if engines == size) for size in (1, 2))
    same = low + (high - low) * (load["scaled"]["engines"] - 1)
    assert load["goodput_of_same_size_rps"] == pytest.approx(same)
    assert load["over_fixed_of_same_size"] == pytest.approx(load["scaled"]["goodput_rps"] / same)
