"""Intervals and tests: against tables, against each other, and their coverage on simulated runs with fixed seeds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gate import statistics

TABLE = [(0.025, 1, 12.7062), (0.025, 4, 2.7764), (0.005, 10, 3.1693), (0.0005, 30, 3.6460), (0.05, 120, 1.6577)]
VALUES = st.lists(st.floats(-5, 5).map(lambda value: round(value, 3)), min_size=3, max_size=12)


@pytest.mark.parametrize(("tail", "df", "t"), TABLE)
def test_student_is_that_of_the_tables(tail, df, t):
    assert statistics.student_quantile(tail, df) == pytest.approx(t, abs=1e-4)
    assert statistics.student_tail(t, df) == pytest.approx(tail, rel=1e-3)


@given(st.floats(-50, 50), st.floats(1, 200))
def test_student_tails_add_up(t, df):
    assert statistics.student_tail(t, df) + statistics.student_tail(-t, df) == pytest.approx(1)


def test_two_columns_are_the_paired_t_test():
    base, head = np.array([1.0, 2.0, 4.0, 3.0]), np.array([1.5, 2.2, 4.9, 3.6])
    found = statistics.blocked(np.stack([base, head], axis=1), (-1, 1))
    differences = head - base
    error = differences.std(ddof=1) / math.sqrt(4)
    assert found.value == pytest.approx(differences.mean())
    assert found.high - found.value == pytest.approx(3.18245 * error, rel=1e-4)
    assert found.p == pytest.approx(statistics.student_tail(differences.mean() / error, 3))


def test_welch_on_a_worked_example():
    base, head = np.array([27.5, 21.0, 19.0, 23.6, 17.0, 17.9]), np.array([27.1, 22.0, 20.8, 23.4, 23.4, 23.5])
    found = statistics.welch(base, head)
    parts = base.var(ddof=1) / 6, head.var(ddof=1) / 6
    df = sum(parts) ** 2 / (parts[0] ** 2 / 5 + parts[1] ** 2 / 5)
    assert found.p == pytest.approx(statistics.student_tail(found.value / math.sqrt(sum(parts)), df))


@given(VALUES, st.floats(-1, 1))
def test_an_estimate_turns_with_its_sides(values, shift):
    base = np.array(values)
    head = base[::-1] + shift
    for method in (statistics.welch, statistics.bootstrap):
        there, back = method(base, head), method(head, base)
        assert there.value == pytest.approx(-back.value)
        assert there.low <= there.high and 0 <= there.p <= 1


@given(st.integers(3, 10), st.floats(-3, 3))
def test_values_that_do_not_vary_are_exact(num_rounds, shift):
    table = np.linspace(1, 2, num_rounds)[:, None] + np.array([0.0, 0.0, shift])
    found = statistics.blocked(table, (-0.5, -0.5, 1))
    assert found.exact and found.low == found.high == pytest.approx(shift, abs=1e-9)
    assert found.p == (0 if found.value > 0 else 1)


@pytest.mark.parametrize("num_rounds", [3, 5, 8])
@pytest.mark.parametrize("weights", [(-1, 1), (-0.5, -0.5, 1)])
@pytest.mark.parametrize("skewed", [False, True])
def test_interleaved_rounds_cover_and_rarely_cry_wolf(num_rounds, weights, skewed):
    rng = np.random.default_rng(num_rounds)
    trials, inside, alarms = 1500, 0, 0
    for _ in range(trials):
        shape = (num_rounds, len(weights))
        noise = rng.lognormal(0, 0.7, shape) if skewed else rng.normal(size=shape)
        found = statistics.blocked(noise + rng.normal(0, 5, (num_rounds, 1)), weights)
        inside += found.low <= 0 <= found.high
        alarms += found.p < 0.01
    assert inside / trials > 0.93
    assert alarms / trials < (0.025 if skewed else 0.017)


@pytest.mark.parametrize(("method", "size"), [(statistics.welch, 4), (statistics.welch, 8), (statistics.bootstrap, 10)])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_two_samples_cover_and_rarely_cry_wolf(method, size, scale):
    rng = np.random.default_rng(size)
    found = [method(rng.normal(size=size), rng.normal(0, scale, size)) for _ in range(1500)]
    assert 0.93 < np.mean([each.low <= 0 <= each.high for each in found]) < 0.98
    assert np.mean([each.p < 0.01 for each in found]) < 0.02


def test_the_number_of_runs_decides_how_two_samples_are_compared():
    rng = np.random.default_rng(0)
    few, many = rng.normal(size=9), rng.normal(size=10)
    assert statistics.unpaired(few, many).method == "Welch t"
    assert statistics.unpaired(many, many + 1).method == "bootstrap"
    assert statistics.unpaired(many, many + 1) == statistics.unpaired(many, many + 1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.001, 0.2))
def test_holm_lies_between_bonferroni_and_no_correction(p_values, alpha):
    found = statistics.holm(p_values, alpha)
    for p, significant in zip(p_values, found, strict=True):
        assert significant or p > alpha / len(p_values)
        assert not significant or p <= alpha


def test_holm_stops_at_the_first_that_fails():
    assert statistics.holm([0.04, 0.001, 0.02, 0.03], 0.05) == [False, True, False, False]
    assert statistics.holm([0.04, 0.001, 0.01, 0.02], 0.05) == [True, True, True, True]
