"""The report says everything a reader must know before believing a figure."""

from pathlib import Path

import pytest

from benchmarks.report.markdown import markdown, scaled
from benchmarks.result import Result


@pytest.fixture(scope="module")
def report(outcome: tuple[Result, Path]) -> str:
    return markdown(outcome[0], [Path("plots/latency-serve-4.png")])


@pytest.mark.parametrize(
    "line",
    [
        "# Benchmark demo",
        "**partial**: stopped by its user",
        "| machine.processor | A CPU |",
        "| commit | abc |",
        "| workload.num_requests | 30 |",
        "| serve@4 | base | 0 | void | the client lagged \\| by 12% |",
        "| serve@16 | base | 1 | failed | the server ended |",
        "- `kv_hit_rate_retries`: no request was admitted again (base: 5 runs, head: 6 runs)",
        "| serve@4 | head | client: lag | 0.01 | 0.01 |",
        "![latency-serve-4](plots/latency-serve-4.png)",
        "- `lookup_s` (s, lower is better): Wall time of one lookup.",
    ],
)
def test_has(report: str, line: str):
    assert line in report.splitlines()


def test_runs_are_counted(report: str):
    assert "Runs: 34 valid, 1 void, 1 failed." in report


def test_every_metric_shown_is_defined(report: str, outcome: tuple[Result, Path]):
    meanings = report.split("## What the metrics mean")[1]
    for run in outcome[0].runs:
        assert all(f"`{name}`" in meanings for name in run.metrics)
    assert "`preemptions`" not in meanings


def test_figures_come_from_valid_runs_only(report: str):
    assert "n=5 | " in next(line for line in report.splitlines() if line.startswith("| `ttft_p50_s` | ms"))


def test_comparison_has_intervals_and_no_ratio_to_zero(report: str):
    rows = [line for line in report.splitlines() if line.startswith("| `comm_share`")]
    assert "| `comm_share` | lower | - |" in rows
    assert "| metric | better | head / base |" in report


def test_tables_are_whole(report: str):
    """Every row has as many cells as the head above it."""
    width = None
    for line in report.splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = line.replace("\\|", "").count("|")
        assert width in (None, cells), line
        width = cells


def test_one_contestant_has_no_comparison(outcome: tuple[Result, Path]):
    alone = outcome[0].model_copy(update={"runs": [run for run in outcome[0].runs if run.contestant == "head"]})
    assert "Ratio to" not in markdown(alone)


def test_a_result_without_runs(outcome: tuple[Result, Path]):
    report = markdown(outcome[0].model_copy(update={"runs": []}))
    assert "Runs: 0 valid" in report and "No metric was measured." in report


def test_a_scenario_of_which_nothing_is_valid(outcome: tuple[Result, Path]):
    runs = [run.model_copy(update={"status": "failed"}) for run in outcome[0].runs]
    assert markdown(outcome[0].model_copy(update={"runs": runs})).count("No valid run.") == 3


@pytest.mark.parametrize(
    ("unit", "largest", "expected"),
    [("s", 2.0, (1, "s")), ("s", 0.02, (1e3, "ms")), ("s", 1e-9, (1e6, "µs")), ("s", 0.0, (1, "s")),
     ("bytes", 2**31, (2**-30, "GiB")), ("bytes", 10, (1, "bytes")), ("ratio", 0.1, (1, "ratio"))],
)  # fmt: skip
def test_scaled(unit: str, largest: float, expected: tuple[float, str]):
    assert scaled(unit, largest) == expected
