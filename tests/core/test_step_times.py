"""Step times are learned from what was measured, and sane before and after hiccups."""

import math
import random

import numpy as np
import pytest

from sagellm.core.hooks import Phase, StepResult
from sagellm.core.step_times import StepTimes, solve


def prefill(tokens, seconds, context=0, num_requests=1, **more):
    return StepResult(0, Phase.PREFILL, num_requests, tokens, 0.0, seconds, context, **more)


def decode(batch, context, seconds):
    return StepResult(0, Phase.DECODE, batch, batch, 0.0, seconds, context)


def taught(noise=0.0, num_steps=200):
    chance, times = random.Random(1), StepTimes()
    for _ in range(num_steps):
        tokens, context, batch = chance.randint(50, 4000), chance.randint(0, 4000), chance.randint(1, 64)
        error = 1 + chance.uniform(-noise, noise)
        times.observe(prefill(tokens, error * (0.004 + 1e-4 * tokens + 2e-9 * tokens * (context + tokens / 2)), context))
        times.observe(decode(batch, 100 * batch + context, error * (0.015 + 3e-4 * batch + 2e-7 * (100 * batch + context))))
    return times


def test_before_anything_was_measured():
    times = StepTimes()
    assert 0 < times.prefill_s(100) < times.prefill_s(1000) < 1 and 0 < times.decode_s(1) < times.decode_s(64) < 1
    assert times.report()["prefill_steps"] == 0


@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.01), (0.1, 0.1)])
def test_it_finds_what_steps_take(noise, error):
    times = taught(noise)
    assert times.prefill_s(1000) == pytest.approx(0.004 + 0.1 + 1e-3, rel=error)
    assert times.prefill_s(500, 3000) == pytest.approx(0.004 + 0.05 + 2e-9 * 500 * 3250, rel=error)
    assert times.decode_s(32, 6000) == pytest.approx(0.015 + 0.0096 + 0.0012, rel=error)
    assert times.report()["decode_steps"] == 200


def test_three_steps_outweigh_the_defaults():
    times = StepTimes()
    for tokens in (100, 1000, 3000):
        times.observe(prefill(tokens, 1.0 + 0.01 * tokens))
    assert times.prefill_s(2000) == pytest.approx(21.0, rel=0.05)


def test_a_hiccup_moves_little_and_a_change_gets_through():
    times = taught()
    before = times.prefill_s(1000)
    times.observe(prefill(1000, 100 * before))
    assert times.prefill_s(1000) < 1.5 * before
    for tokens in [500, 1000, 2000] * 25:
        times.observe(prefill(tokens, 3 * (0.004 + 1e-4 * tokens)))
    assert times.prefill_s(1000) == pytest.approx(3 * 0.104, rel=0.2)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan, 1e9])
def test_what_was_not_measured_is_not_learned(seconds):
    times = StepTimes()
    times.observe(prefill(1000, seconds))
    times.observe(prefill(2**62, 1.0))
    assert times.report()["prefill_steps"] == 0


def test_copies_are_not_the_steps_own():
    times = StepTimes()
    for tokens in (100, 1000, 3000):
        times.observe(prefill(tokens, 1.0 + 0.001 * tokens, swap_s=0.5))
    assert times.prefill_s(1000) == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("context", [0, 2000])
@pytest.mark.parametrize("seconds", [0.01, 0.1, 0.5])
def test_tokens_within_a_time(seconds, context):
    times = taught()
    tokens = times.tokens_within(seconds, context)
    assert times.prefill_s(tokens, context) <= seconds < times.prefill_s(tokens + 1, context)
    assert times.tokens_within(0.001) == 0


def test_small_systems_are_solved():
    draw = np.random.default_rng(1)
    for size in (1, 2, 3):
        features = draw.uniform(0.1, 100, (5, size))
        matrix, sums = features.T @ features, draw.uniform(-1, 1, size)
        assert solve(matrix.tolist(), sums.tolist()) == pytest.approx(np.linalg.solve(matrix, sums), rel=1e-6)
