"""Lifetime predictors: calibrated where their assumption holds, and each better than the simpler one where that fails."""

import heapq
import math

import numpy as np
import pytest

from sagellm.core.errors import PolicyError
from sagellm.kv_policy import (
    LifetimePredictor,
    calibrate,
    calibration_error,
    lifetime_predictor_names,
    make_lifetime_predictor,
)
from sagellm.kv_policy.lifetime.base import reuse_probability
from sagellm.kv_policy.lifetime.exponential import ExponentialLifetime
from sagellm.kv_policy.lifetime.history import HistoryLifetime
from sagellm.kv_policy.lifetime.learned import LearnedLifetime
from sagellm.kv_policy.lifetime.ratios import LogRatios

NAMES = lifetime_predictor_names()[:3]


def renewals(draw_gap, num_keys, num_accesses):
    """A trace in which each key comes back after gaps drawn by `draw_gap(key)`."""
    coming = [(draw_gap(key), key) for key in range(num_keys)]
    heapq.heapify(coming)
    for _ in range(num_accesses):
        time_s, key = coming[0]
        heapq.heapreplace(coming, (time_s + draw_gap(key), key))
        yield time_s, key


def alike(seed=0):
    random = np.random.default_rng(seed)
    return list(renewals(lambda key: random.exponential(10.0), 200, 5000))


def each_its_own(seed=0):
    """Gaps of each key near one of its own, from .1 to 1000 seconds."""
    random = np.random.default_rng(seed)
    centres = 10 ** random.uniform(-1, 3, 150)
    return list(renewals(lambda key: centres[key] * random.lognormal(0, 0.3), 150, 5000))


@pytest.mark.parametrize("name", NAMES)
def test_calibrated_where_gaps_are_exponential_and_alike(name):
    assert calibration_error(make_lifetime_predictor(name), alike()) < 0.05


def test_history_and_learning_see_that_keys_differ():
    exponential, history, learned = (calibrate(make_lifetime_predictor(name), each_its_own()) for name in NAMES)
    assert exponential.error > 0.1 and history.error < 0.05 and learned.error < 0.05
    assert exponential.median_ratio > 1.4 * max(history.median_ratio, learned.median_ratio)


def test_the_exponential_one_is_memoryless_and_knows_its_mean():
    predictor = ExponentialLifetime()
    assert predictor.predict_ttl(1, 0.0) == math.inf
    for time_s in range(0, 50, 5):
        predictor.observe(1, float(time_s))
    assert predictor.predict_ttl(1, 45.0, 0.5) == predictor.predict_ttl(1, 60.0, 0.5) == pytest.approx(5 * math.log(2))
    assert predictor.predict_ttl(2, 45.0, 1 - math.exp(-2)) == pytest.approx(10.0)


@pytest.mark.parametrize("name", NAMES)
def test_longer_for_a_higher_quantile_and_never_negative(name):
    predictor = make_lifetime_predictor(name)
    for time_s, key in each_its_own()[:2000]:
        predictor.observe(key, time_s)
    for key in (0, 3, 999):
        for later_s in (0.0, 1.0, 1e6):
            lifetimes = [predictor.predict_ttl(key, time_s + later_s, share / 20) for share in range(1, 20)]
            assert lifetimes == sorted(lifetimes) and lifetimes[0] >= 0
            assert math.isfinite(lifetimes[-1]) or later_s == 1e6  # no gap was as long as that


def test_what_has_waited_long_will_wait_longer_where_gaps_differ_widely():
    random = np.random.default_rng(1)
    predictor = LearnedLifetime()
    for time_s, key in renewals(lambda key: random.lognormal(0, 2), 50, 4000):
        predictor.observe(key, time_s)
    last_s = max(seen.time_s for seen in predictor._seen.values())
    assert predictor.predict_ttl(1, last_s + 100.0) > 3 * predictor.predict_ttl(1, predictor._seen[1].time_s)


def test_history_falls_back_to_the_mean_of_all():
    predictor = HistoryLifetime(min_gaps=2)
    for time_s in (0.0, 4.0, 8.0):
        predictor.observe(1, time_s)
    assert predictor.predict_ttl(2, 8.0, 0.5) == pytest.approx(4 * math.log(2))
    assert predictor.predict_ttl(1, 8.0, 0.5) == pytest.approx(
        4 * math.log(2), rel=0.1
    )  # its own, with no ratios seen yet


def test_returns_are_counted_by_uses():
    predictor = ExponentialLifetime()
    for key in range(100):
        predictor.observe(key, float(key))
    for key in range(20):
        predictor.observe(key, 100.0 + key)
    assert predictor.predict_return(99) == pytest.approx(0.2, abs=0.02) == predictor.predict_return(12345)
    assert predictor.predict_return(3) == pytest.approx(0.0, abs=0.05) and predictor.num_gaps == 20
    assert reuse_probability(predictor, 99, 99.0, 1e9) == pytest.approx(0.2, abs=0.02)
    assert reuse_probability(predictor, 99, 99.0, 100 * math.log(2)) == pytest.approx(0.1, abs=0.02)
    # After a mean gap a quarter as many as at first are left of those that come back: e**-1 of .2, beside .8.
    returns = predictor.predict_return(99)
    left = returns / math.e
    assert reuse_probability(predictor, 99, 199.0, 1e9) == pytest.approx(left / (left + 1 - returns), abs=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_that_waited_longer_than_any_did_does_not_come_back(name):
    predictor = make_lifetime_predictor(name)
    for number in range(5000):
        predictor.observe(number % 50, float(number))
    at_once, late, later, last = (
        reuse_probability(predictor, 3, 4953.0 + age_s, 100.0) for age_s in (0.0, 400.0, 1000.0, 1e9)
    )
    assert at_once > 0.8 and at_once >= late >= later >= last == 0.0 and later < 0.01
    if name != "exponential":
        assert predictor.predict_ttl(3, 1e9) == math.inf and late < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_reuse_is_right_at_the_age_at_which_an_lru_tier_evicts(name):
    """Some keys come back every 20 s or so, the others once and never: old ones are of the latter."""
    random = np.random.default_rng(3)
    events = list(renewals(lambda key: random.exponential(20.0), 100, 6000))
    last_s = events[-1][0]
    once = [(time_s, 1000 + number) for number, time_s in enumerate(np.linspace(0, last_s, 4000).tolist())]
    uses: dict[int, list[float]] = {}
    for time_s, key in events + once:
        uses.setdefault(key, []).append(time_s)
    predictor = make_lifetime_predictor(name)
    predicted, came = [], []
    for number, (time_s, key) in enumerate(sorted(events + once)):
        predictor.observe(key, time_s)
        if time_s > last_s / 2 and time_s < last_s - 100 and number % 7 == 0:
            evicted = min(predictor._seen, key=lambda other: abs(predictor._seen[other].time_s - (time_s - 40.0)))
            predicted.append(reuse_probability(predictor, evicted, time_s, 20.0))
            came.append(any(time_s < use_s <= time_s + 20.0 for use_s in uses[evicted]))
    assert np.mean(predicted) == pytest.approx(np.mean(came), abs=0.05)


def test_reuse_of_a_predictor_of_somebody_else():
    class Clockwork(LifetimePredictor):
        name = "clockwork"

        def observe(self, key, time_s):
            pass

        def predict_ttl(self, key, time_s, quantile=0.5):
            return math.inf if key == 0 else 10.0 * quantile

    assert reuse_probability(Clockwork(), 1, 0.0, 4.0) == pytest.approx(0.4, abs=1 / 64)
    assert reuse_probability(Clockwork(), 0, 0.0, 4.0) < 0.02


@pytest.mark.parametrize("name", NAMES)
def test_what_is_remembered_is_bounded(name):
    predictor = make_lifetime_predictor(name, max_keys=10)
    for number in range(500):
        predictor.observe(number // 2 % 60, float(number))
    assert len(predictor._seen) == 10
    predictor = make_lifetime_predictor(name, max_keys=2)
    for time_s, key in enumerate((1, 2, 1, 3)):
        predictor.observe(key, float(time_s))
    assert set(predictor._seen) == {1, 3}  # 2 was unseen for longest


def test_the_regression_stays_finite_when_nothing_varies():
    predictor = LearnedLifetime(forgetting=0.5)
    for number in range(3000):
        predictor.observe(number // 2, float(number))
    assert np.isfinite(predictor._inverse).all() and 0.1 < predictor.predict_ttl(9999, 3000.0) < 10


def test_ratios_are_an_empirical_distribution():
    ratios = LogRatios(prior=1e-9)
    values = np.random.default_rng(2).normal(1.0, 2.0, 5000)
    for value in values:
        ratios.add(float(value))
    for share in (0.1, 0.5, 0.9):
        assert ratios.quantile(share) == pytest.approx(np.quantile(values, share), abs=0.15)
        above = values[values > 2.0]
        assert ratios.quantile(share, above=2.0) == pytest.approx(np.quantile(above, share), abs=0.15)


def test_ratios_forget():
    ratios = LogRatios(memory=100)
    for value in [0.0] * 2000 + [5.0] * 1000:
        ratios.add(value)
    assert ratios.quantile(0.05) == pytest.approx(5.0, abs=0.2)


@pytest.mark.parametrize("quantile", [0, 1, -0.5, math.nan])
def test_a_quantile_is_between_0_and_1(quantile):
    with pytest.raises(PolicyError, match="above 0 and below 1"):
        ExponentialLifetime().predict_ttl(1, 0.0, quantile)


@pytest.mark.parametrize(
    ("name", "options"), [("exponential", {"max_keys": 0}), ("history", {"min_gaps": 0}), ("learned", {"forgetting": 1.5})]
)  # fmt: skip
def test_options_out_of_range(name, options):
    with pytest.raises(PolicyError):
        make_lifetime_predictor(name, **options)


def test_what_is_said_to_come_never_counts_by_share_only():
    found = calibrate(ExponentialLifetime(), [(0.0, 1), (10.0, 1), (20.0, 1), (21.0, 2)], warm_up=0)
    assert found.num_gaps == 2 and found.shares[8] == 1.0 and 1 <= found.median_ratio < 2
    alone = calibrate(ExponentialLifetime(), [(0.0, 1), (10.0, 1)], warm_up=0)
    assert alone.median_ratio == math.inf and alone.shares == (1.0,) * 9
    late = [(float(number), number % 1500) for number in range(3000)]
    for name in NAMES:
        assert calibrate(make_lifetime_predictor(name), late).num_gaps > 100


@pytest.mark.parametrize("time_s", [math.nan, math.inf, -math.inf, 1.5])
def test_a_trace_whose_times_fall_or_are_none_cannot_calibrate(time_s):
    with pytest.raises(PolicyError, match="access 2 is at"):
        calibrate(ExponentialLifetime(), [(1.0, 1), (2.0, 1), (time_s, 1), (4.0, 1)], warm_up=0)


def test_a_trace_without_returns_cannot_calibrate():
    with pytest.raises(PolicyError, match="no block that comes back"):
        calibration_error(ExponentialLifetime(), [(0.0, 1), (1.0, 2)], warm_up=0)
