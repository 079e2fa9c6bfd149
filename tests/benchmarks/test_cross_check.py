"""Tests of how the cross-check compares figures. The peers themselves are not installed here."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.cross_check import compare, main, table

SERVER = {"server_ttft_s": 0.05, "server_itl_s": 0.02, "server_output_tokens_per_s": 100.0}
OURS = {"ttft_s": 0.055, "itl_s": 0.020, "itl_by_request_s": 0.021, "output_tokens_per_s": 99.0}
THEIRS = {"ttft_s": 0.050, "itl_s": 0.021, "output_tokens_per_s": 90.0}


def test_a_figure_is_set_against_its_counterpart():
    rows = compare("aiperf", [OURS | SERVER], [THEIRS | SERVER])
    ratios = {metric: row["ratio"]["median"] for metric, row in rows.items()}
    # aiperf takes the mean over requests, guidellm that over gaps.
    assert ratios == pytest.approx({"ttft_s": 1.1, "itl_s": 1.0, "output_tokens_per_s": 1.1})
    assert compare("guidellm", [OURS | SERVER], [THEIRS | SERVER])["itl_s"]["ratio"]["median"] == pytest.approx(20 / 21)


def test_a_server_that_was_slower_in_one_round_is_told_apart():
    slow = SERVER | {"server_ttft_s": 0.06}
    rows = compare("aiperf", [OURS | slow], [THEIRS | SERVER])
    assert rows["ttft_s"]["ratio"]["median"] == pytest.approx(1.1)
    assert rows["ttft_s"]["ratio_to_server"]["median"] == pytest.approx(1.1 * 5 / 6)
    text = table({"comparisons": {"aiperf": rows}, "versions": {"aiperf": "0.13.0"}})
    assert "| aiperf 0.13.0 | TTFT, ms | 55.00 / 50.00 | 1.100 | 1.100 | 0.917 |" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [((), "give --aiperf or --guidellm"), (("--aiperf", "/nowhere/aiperf"), "pip install aiperf==0.13.0")],
)
def test_without_a_peer_it_says_what_to_install(options: tuple[str, ...], text: str, tmp_path: Path):
    done = CliRunner().invoke(main, [*options, "--out", str(tmp_path / "out.json")])
    assert done.exit_code == 2 and text in done.stderr
    assert not (tmp_path / "out.json").exists()
