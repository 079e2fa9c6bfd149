"""Tests of the summary that a pull request shows."""

import numpy as np
import pytest

from benchmarks.gate import judge, markdown
from benchmarks.gate.summary import amount
from tests.benchmarks.gate.made_up import make_result, noisy_runs, rule, steady

TRIO = ("base", "control", "head")


def row(text, metric):
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {metric} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_pass_shows_everything_that_it_rests_on():
    text = markdown(judge(steady(names=TRIO)))
    assert text.startswith("## Benchmark: pass\n\n**Pass**: none of 10 gated metrics")
    assert "| metric | base | head | change (95% interval) | limit | verdict |" in text
    _, base, head, change, limit, verdict = row(text, "ttft_p50_s")
    assert base.endswith(" ms") and head.endswith(" ms") and "[" in change
    assert (limit, verdict) == ("+5% and 1 ms", "pass")
    assert row(text, "mfu")[4].startswith("-1%")
    assert row(text, "comm_share")[3] == "+0.00% (exact)"
    assert "A/A check passed for 10 metrics" in text
    assert "Runs: base 6, control 6, head 6; interleaved, compared in pairs; servers started once, so that" in text
    assert (
        "Machine: Example CPU 3000, 2 cores; versions: lmdeploy 0.11.0; commits: base 000000000000, head abcabcabcabc (changed)"
        in text
    )


def test_a_regression_names_the_metrics_and_their_change():
    text = markdown(judge(steady(head={"ttft_p95_s": 1.2})))
    assert text.startswith("## Benchmark: regression\n\n**Regression** of head against base: ttft_p95_s +")
    assert row(text, "ttft_p95_s")[5] == "**regression**"
    assert "A/A check: not run" in text


def test_an_improvement_is_told():
    text = markdown(judge(steady(head={"tpot_p50_s": 0.8})))
    assert "better: tpot_p50_s -19." in text and row(text, "tpot_p50_s")[5] == "improved"


def test_noise_is_told_by_how_much():
    table = noisy_runs(6, 0.005, np.random.default_rng(0), {"base": {}, "control": {"tpot_p50_s": 1.2}, "head": {}})
    text = markdown(judge(make_result(table)))
    assert "## Benchmark: cannot tell" in text and "too noisy to judge on" in text
    assert "A/A check **failed**" in text and "tpot_p50_s moved by +20." in text


def test_too_few_rounds_and_void_runs_are_told():
    result = steady(rounds=3)
    result.runs[-1].status = "void"
    text = markdown(judge(result))
    assert "**Cannot tell** about mfu" in text and "- mfu: 2 launches, or rounds of one launch; at least 3 are needed" in text
    assert "head 2 (1 void, left out)" in text


def test_two_files_are_warned_about():
    current, baseline = steady(names=("head",), seed=1), steady(names=("head",))
    baseline.environment["commits"] = {"head": {"commit": None}}
    text = markdown(judge(current, baseline))
    assert "measured apart" in text and "is in no interval; Welch t, exact" in text.replace(
        "exact, Welch t", "Welch t, exact"
    )
    assert "baseline: Machine" in text and "commits: head unknown" in text


def test_reasons_cannot_break_the_table():
    ungated = rule(gated=False, reason="a | b\nc")
    text = markdown(judge(steady(), rules=(ungated, rule(metric="ttft_p95_s"))))
    assert "- ttft_p50_s: a \\| b c" in text and row(text, "ttft_p50_s")[4:] == ["–", "not gated"]


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.0123456, "s", "12.35 ms"),
        (2.5, "s", "2.5 s"),
        (0.21, "", "0.21"),
        (2200.4, "t/s", "2200 t/s"),
        (0.5, "ratio", "0.5"),
    ],
)
def test_amounts(value, unit, shown):
    assert amount(value, unit) == shown
