"""Verdicts, case by case, and what holds for all of them."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.errors import BenchmarkError
from benchmarks.gate import DEFAULT_RULES, Verdict, judge
from benchmarks.gate.base import PASSED, REGRESSED, UNDECIDED
from benchmarks.gate.judge import compare, judge_series, noise_check
from tests.benchmarks.gate.made_up import LEVELS, make_result, noisy_runs, rule, series, steady

TRIO = ("base", "control", "head")
WOBBLE = np.array([1.0, 1.004, 0.997, 1.002, 0.998, 1.001])


def verdict(values, **changes):
    """The verdict on one metric by itself."""
    asked = rule(**changes)
    return judge_series({asked: values})[asked].verdict


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1.0, "pass"), (1.03, "pass"), (1.10, "regression"), (1.06, "regression"), (0.97, "pass"), (0.90, "improved")],
)
@pytest.mark.parametrize("better", ["lower", "higher"])
@pytest.mark.parametrize("scale", ["ratio", "difference"])
@pytest.mark.parametrize("paired", [True, False])
def test_size_of_a_clear_change_decides(factor, expected, better, scale, paired):
    head = 0.06 * WOBBLE[::-1] * (factor if better == "lower" else 2 - factor)
    values = series(0.06 * WOBBLE, head, paired=paired)
    assert verdict(values, better=better, scale=scale) == expected


def test_a_change_must_be_beyond_both_limits():
    base, head = 0.004 * WOBBLE, 0.0048 * WOBBLE[::-1]
    assert verdict(series(base, head)) == Verdict.PASS  # 20%, but 0.8 ms
    assert verdict(series(base, head), absolute=0.0005) == Verdict.REGRESSION
    assert verdict(series(base, head), absolute=0.0005, relative=0.3) == Verdict.PASS


def test_a_change_that_noise_explains_is_no_regression_and_no_pass():
    rng = np.random.default_rng(3)
    base = 0.06 * np.exp(rng.normal(0, 0.2, 6))
    assert verdict(series(base, base[::-1] * 1.1)) == Verdict.CANNOT_TELL


def test_a_suspicion_that_too_few_runs_cannot_settle_is_no_pass():
    head = 0.06 * np.array([1.045, 1.08, 1.065])
    found = judge_series({rule(): series(np.full(3, 0.06), head)})[rule()]
    assert found.verdict == Verdict.CANNOT_TELL and "so few runs" in found.reason


@pytest.mark.parametrize("num_rounds", [0, 1, 2])
@pytest.mark.parametrize("paired", [True, False])
def test_fewer_than_three_runs_are_too_few(num_rounds, paired):
    values = series(np.full(num_rounds, 0.06), np.full(num_rounds, 0.5), paired=paired)
    found = judge_series({rule(): values})[rule()]
    assert found.verdict == Verdict.CANNOT_TELL and found.reason.startswith(str(num_rounds))


def test_runs_that_do_not_vary_need_no_test():
    flat = np.full(5, 0.62)
    limits = {"better": "higher", "relative": 0.005, "absolute": 0.002, "scale": "difference"}
    assert verdict(series(flat, flat), **limits) == Verdict.PASS
    assert verdict(series(flat, flat - 0.001), **limits) == Verdict.PASS
    assert verdict(series(flat, flat - 0.01), **limits) == Verdict.REGRESSION
    assert verdict(series(flat, flat + 0.01), **limits) == Verdict.IMPROVED


def test_a_share_that_rises_from_nothing_is_a_regression():
    limits = {"relative": 0.02, "absolute": 0.002, "scale": "difference"}
    found = judge_series({rule(**limits): series(np.zeros(4), np.full(4, 0.05))})[rule(**limits)]
    assert found.verdict == Verdict.REGRESSION and found.change.relative.value == np.inf
    assert verdict(series(np.zeros(4), np.zeros(4)), **limits) == Verdict.PASS


def test_zeros_have_no_ratio_and_are_compared_as_differences():
    assert verdict(series(np.zeros(4), np.zeros(4))) == Verdict.PASS
    assert verdict(series(np.zeros(4), np.full(4, 0.05))) == Verdict.REGRESSION


def test_an_ungated_metric_is_shown_and_not_judged():
    asked = rule(gated=False, reason="noisy on this machine")
    found = judge_series({asked: series(0.06 * WOBBLE, 0.12 * WOBBLE)})[asked]
    assert (found.verdict, found.reason) == (Verdict.NOT_GATED, "noisy on this machine")
    assert found.change.relative.value == pytest.approx(1.0)


def test_one_measurement_under_three_names_is_one_test():
    """Alone, this change is just significant; as one of three unrelated tests it would not be."""
    base, head = np.full(5, 0.06), 0.06 * np.array([1.03, 1.08, 1.13, 1.05, 1.12])
    alone = rule()
    p = compare(alone, series(base, head)).p
    assert 0.01 / 3 < p < 0.01
    price, inverse = rule(metric="cost"), rule(metric="rate", better="higher", absolute=0)
    unrelated = {rule(metric=name): series(base, base * (1 + s * np.array([0.01, 0, 0.02, 0, -0.01])))
                 for name, s in (("a", 1), ("b", -1))}  # fmt: skip
    same = {alone: series(base, head), price: series(base * 7, head * 7), inverse: series(1 / base, 1 / head)}
    assert {each.verdict for each in judge_series(same).values()} == {Verdict.REGRESSION}
    assert judge_series({alone: series(base, head), **unrelated})[alone].verdict == Verdict.CANNOT_TELL


def test_a_control_makes_few_rounds_enough():
    rng = np.random.default_rng(2)
    base, control, head = (0.06 * np.exp(rng.normal(0, 0.012, 4)) for _ in range(3))
    lone, backed = (compare(rule(), series(base, head * 1.1, side)) for side in (None, control))
    assert backed.p < lone.p and backed.absolute.half_width < lone.absolute.half_width


def test_control_that_moves_fails_the_check_and_says_how_much():
    base = 0.06 * WOBBLE
    (quiet,) = noise_check({rule(): series(base, base, base[::-1])})
    (moved,) = noise_check({rule(): series(base, base, 0.92 * base[::-1])})
    (wild,) = noise_check({rule(): series(base, base, base * [0.7, 1.3, 0.8, 1.2, 0.9, 1.1])})
    assert quiet.problem == ""
    assert "moved by -8.0%" in moved.problem and "limit is 5.0%" in moved.problem
    assert wild.problem.startswith("uncertain by ±")


def test_an_erratic_head_is_not_blamed_on_the_machine():
    base = 0.06 * WOBBLE
    (found,) = noise_check({rule(): series(base, base * [1, 2, 1, 3, 1, 2], base[::-1])})
    assert found.problem == ""


@given(
    st.lists(st.floats(0.5, 2.0), min_size=3, max_size=8),
    st.lists(st.floats(0.5, 2.0), min_size=8, max_size=8),
    st.floats(1.0, 3.0),
    st.sampled_from(["lower", "higher"]),
    st.booleans(),
)
def test_being_worse_never_helps(base, head, factor, better, paired):
    """More of the same never gives a milder verdict."""
    head = np.array(head[: len(base)])
    asked = rule(better=better, absolute=0)
    worse = head * factor if better == "lower" else head / factor
    before, after = (compare(asked, series(base, side, paired=paired)) for side in (head, worse))
    order = [Verdict.IMPROVED, Verdict.PASS, Verdict.CANNOT_TELL, Verdict.REGRESSION]
    found = [judge_series({asked: series(base, side, paired=paired)})[asked].verdict for side in (head, worse)]
    assert order.index(found[1]) >= order.index(found[0])
    if before.method == after.method:
        assert after.p <= before.p + 1e-9


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=10), st.floats(1e-3, 1e3))
def test_units_do_not_matter_without_an_absolute_limit(base, unit):
    head = np.array(base[::-1]) * 1.07
    one, other = (compare(rule(absolute=0), series(np.array(base) * u, head * u)) for u in (1, unit))
    assert one.relative == pytest.approx(other.relative, abs=1e-6)
    assert one.p == pytest.approx(other.p, abs=1e-6)


# ---- whole results


def test_identical_code_passes_and_a_planted_slowdown_fails():
    same = judge(steady(names=TRIO))
    slow = judge(steady(names=TRIO, head={"ttft_p50_s": 1.1, "ttft_p95_s": 1.1}))
    assert (same.exit_code, same.verdict) == (PASSED, Verdict.PASS)
    assert (slow.exit_code, slow.verdict) == (REGRESSED, Verdict.REGRESSION)
    assert {metric.rule.name for metric in slow.of(Verdict.REGRESSION)} == {"ttft_p50_s", "ttft_p95_s"}
    assert len(same.metrics) == len([one for one in DEFAULT_RULES if one.scenario == "serve"]) == len(same.noise)
    assert json.dumps(slow.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("metric", "factor"),
    [("mfu", 0.95), ("tpot_p50_s", 1.1), ("tpot_p95_s", 1.1), ("kv_hit_rate_tokens", 0.98),
     ("kv_hit_rate_blocks", 0.98), ("cost_per_mtok", 1.05), ("device_s_per_mtok", 1.05)],
)  # fmt: skip
def test_every_named_threshold_is_kept(metric, factor):
    assert [each.rule.name for each in judge(steady(head={metric: factor})).of(Verdict.REGRESSION)] == [metric]
    assert judge(steady(head={metric: 2 - factor})).exit_code == PASSED


@pytest.mark.parametrize(("factor", "verdict"), [(1.1, Verdict.REGRESSION), (1.0, Verdict.PASS)])
def test_communication_of_two_ranks_is_gated(factor, verdict):
    result, rng = steady(), np.random.default_rng(0)
    for run in list(result.runs):
        share = rng.normal(0.6, 0.005) * (factor if run.contestant == "head" else 1)
        metrics = {"comm_share_reported": share}
        result.runs.append(run.model_copy(update={"scenario": "comm_share", "metrics": metrics}))
    (found,) = (each for each in judge(result).metrics if each.rule.scenario == "comm_share")
    assert found.verdict == verdict


@pytest.mark.parametrize("metric", ["quantized_kl", "quantized_step_s"])
@pytest.mark.parametrize(("factor", "verdict"), [(1.2, Verdict.REGRESSION), (1.0, Verdict.PASS)])
def test_loss_and_speed_of_a_quantized_model_are_gated(metric, factor, verdict):
    result, rng = steady(), np.random.default_rng(0)
    for run in list(result.runs):
        metrics = {"quantized_kl": 0.01, "quantized_step_s": rng.normal(0.004, 2e-5)}
        metrics[metric] *= factor if run.contestant == "head" else 1
        result.runs.append(run.model_copy(update={"scenario": "quantized", "metrics": metrics}))
    found = {each.rule.metric: each.verdict for each in judge(result).metrics if each.rule.scenario == "quantized"}
    assert found.pop(metric) == verdict and set(found.values()) == {Verdict.PASS}


def test_noise_of_the_machine_comes_before_a_regression():
    rng = np.random.default_rng(0)
    table = noisy_runs(6, 0.005, rng, {"base": {}, "control": {"tpot_p50_s": 1.2}, "head": {"ttft_p50_s": 1.5}})
    found = judge(make_result(table))
    assert found.exit_code == UNDECIDED and [each.rule.name for each in found.noisy] == ["tpot_p50_s"]
    assert found.of(Verdict.REGRESSION)


def test_a_regression_outweighs_what_cannot_be_told():
    rng = np.random.default_rng(0)
    table = noisy_runs(6, 0.005, rng, {"base": {}, "head": {"ttft_p50_s": 1.2}})
    for number, factor in enumerate((1, 2, 0.5, 3, 0.3, 1)):
        table["head"][number]["tpot_p95_s"] *= factor
    found = judge(make_result(table))
    assert found.exit_code == REGRESSED and [m.rule.name for m in found.of(Verdict.CANNOT_TELL)] == ["tpot_p95_s"]


def test_two_files_are_two_samples():
    found = judge(steady(names=("head",), seed=1), steady(names=("head",), seed=2))
    assert not found.paired and found.noise == () and found.exit_code == PASSED
    slow = judge(steady(names=("head",), seed=1, head={"ttft_p50_s": 1.2}), steady(names=("head",), seed=2))
    assert slow.exit_code == REGRESSED


def test_the_same_file_twice_is_compared_in_pairs():
    result = steady()
    assert judge(result, result, base_name="base", head_name="head").paired


def test_void_runs_are_left_out_of_every_side_of_their_round():
    result = steady(names=TRIO)
    spoiled = next(run for run in result.runs if run.contestant == "control" and run.round == 2)
    spoiled.status, spoiled.reason = "void", "the client was late"
    spoiled.metrics["ttft_p50_s"] = 99.0
    found = judge(result)
    assert found.num_runs["control"] == (5, 1)
    assert {metric.change.num_base for metric in found.metrics} == {5} and found.exit_code == PASSED


def test_a_metric_that_both_sides_excuse_is_not_gated():
    result = steady()
    for run in result.runs:
        del run.metrics["mfu"]
        run.absent["mfu"] = "no peak is known"
    (found,) = judge(result).of(Verdict.NOT_GATED)
    assert (found.rule.name, found.reason) == ("mfu", "no peak is known")


def test_a_metric_that_head_alone_lacks_is_no_pass():
    result = steady()
    for run in result.runs:
        if run.contestant == "head":
            del run.metrics["mfu"]
            run.absent["mfu"] = "no peak is known"
    found = judge(result)
    assert found.exit_code == UNDECIDED and "no peak is known" in found.of(Verdict.CANNOT_TELL)[0].reason


def test_a_missing_metric_without_a_reason_is_misuse():
    result = steady()
    for run in result.runs:
        del run.metrics["mfu"], run.metrics["tpot_p50_s"]
    with pytest.raises(BenchmarkError, match=r"mfu \(baseline\), mfu \(current\), tpot_p50_s"):
        judge(result)
    ungated = [rule(metric=name, gated=False, reason="not measured") for name in ("mfu", "tpot_p50_s")]
    kept = [each for each in DEFAULT_RULES if each.metric not in ("mfu", "tpot_p50_s")]
    assert judge(result, rules=(*ungated, *kept)).exit_code == PASSED


def test_nothing_left_to_judge_is_misuse():
    rules = tuple(rule(metric=name, gated=False, reason="off") for name in LEVELS)
    with pytest.raises(BenchmarkError, match="no gated metric"):
        judge(steady(), rules=rules)


def test_a_rule_for_another_scenario_judges_its_runs():
    result = steady()
    for run in result.runs:
        run.scenario = "prefix_index"
    with pytest.raises(BenchmarkError, match="no gated metric"):
        judge(result)
    asked = rule(scenario="prefix_index", absolute=0)
    assert [metric.rule.name for metric in judge(result, rules=(asked,)).metrics] == ["prefix_index/ttft_p50_s"]
    with pytest.raises(BenchmarkError, match="'other' was not run"):
        judge(result, rules=(rule(scenario="other"),))


def test_a_few_lucky_rounds_are_no_improvement():
    asked = rule(relative=0.01, absolute=1e-6)
    found = judge_series({asked: series([1.0, 1.0, 1.0], [0.97, 0.955, 0.975])})[asked]
    assert found.change.relative.high < 0 and found.verdict == Verdict.PASS


def test_the_luck_of_a_launch_is_no_regression():
    """Where a process finds its memory makes all its rounds slower; many rounds prove that and say nothing of the code."""
    found = steady(rounds=60, names=TRIO, sd=0.002)
    luck = {(name, launch): 1.25 if (name, launch) == ("head", 1) else 1.0 for name in TRIO for launch in range(3)}
    assert judge(scaled(found, luck, launches=False)).of(Verdict.REGRESSION)
    assert not judge(scaled(found, luck, launches=True)).of(Verdict.REGRESSION)


def test_the_error_of_a_measured_peak_is_no_change_of_mfu():
    current, baseline = steady(names=("head",), seed=1), steady(names=("head",))
    current.environment["peak"] = {"head": {"flops": 1.0e11, "name": "measured GEMM peak, float32"}}
    baseline.environment["peak"] = {"head": {"flops": 1.1e11, "name": "measured GEMM peak, float32"}}
    for run in current.runs:
        run.metrics["mfu"] *= 1.1
    mfu = next(found for found in judge(current, baseline).metrics if found.rule.metric == "mfu")
    assert mfu.verdict == Verdict.PASS and abs(mfu.change.relative.value) < 0.01
    for result in (current, baseline):
        result.environment["peak"]["head"]["name"] = "given in the config"
    mfu = next(found for found in judge(current, baseline).metrics if found.rule.metric == "mfu")
    assert mfu.change.relative.value == pytest.approx(0.1, abs=0.01)


def scaled(result, luck, launches):
    """`result` with its 60 rounds in three launches, each of which multiplies the time to the first token."""
    runs = []
    for run in result.runs:
        launch = run.round // 20
        slower = {name: run.metrics[name] * luck[run.contestant, launch] for name in ("ttft_p50_s", "ttft_p95_s")}
        runs.append(run.model_copy(update={"metrics": run.metrics | slower, "launch": launch if launches else 0}))
    return result.model_copy(update={"runs": runs})
