"""Figures, step times and comparisons, on numbers worked out by hand."""

import math
import random

import pytest

from sagellm.core.hooks import Phase, ServiceLevel
from sagellm.replay.schedule.base import RequestTimes, Run, StepRun
from sagellm.replay.schedule.compare import StepDifference, compare
from sagellm.replay.schedule.metrics import Targets, figures, groups, meets
from sagellm.replay.schedule.step_times import fit_step_times


def times(number, arrival_s, *token_s, **asked):
    return RequestTimes(number, arrival_s, len(token_s), token_s[0], token_s[-1], token_s, ServiceLevel(**asked))


RUN = Run(
    "tested",
    (
        times(0, 0.0, 1.0, 2.0, 4.0, tenant_id="a", ttft_s=1.5, tpot_s=1.5),
        times(1, 1.0, 4.0, 5.0, tenant_id="b", priority=2, ttft_s=2.5),
        times(2, 2.0, 10.0, tenant_id="b", priority=2),
    ),
    (),
    num_preempted=3,
)


def test_figures():
    found = figures(RUN.requests, Targets(), RUN.num_preempted)
    assert (found.ttft_mean_s, found.ttft_p50_s) == (4.0, 3.0) and found.ttft_p95_s == pytest.approx(7.5)
    assert (found.tpot_mean_s, found.makespan_s, found.preempted) == (1.25, 10.0, 3)
    assert found.itl_p99_s == pytest.approx(1.98)
    assert found.tokens_per_s == 0.6
    assert found.goodput == 0.2  # requests 0, and 2, which asked for nothing; 1 came too late
    assert figures(RUN.requests, Targets(ttft_s=7.0)).goodput == 0.1  # nor has 2 what everybody shall have
    assert figures([times(0, 0.0, 1.0)], Targets()).goodput is None
    assert figures([times(0, 0.0, 1.0)], Targets()).tpot_mean_s is None


def test_groups():
    found = groups(RUN, Targets())
    assert [(tenant, priority, part.num_requests) for tenant, priority, part in found] == [("a", 0, 1), ("b", 2, 2)]
    assert [part.tokens_per_s for _, _, part in found] == [0.3, 0.3]


@pytest.mark.parametrize(
    "asked, targets, expected",
    [
        ({}, Targets(), True),
        (dict(ttft_s=1.0), Targets(ttft_s=0.1), True),  # what it asked for goes before what is given
        (dict(ttft_s=0.9), Targets(), False),
        ({}, Targets(tpot_s=1.4), False),
        ({}, Targets(tpot_s=1.5), True),
        (dict(deadline_s=4.0), Targets(), True),
        (dict(deadline_s=3.9), Targets(), False),
    ],
)
def test_targets(asked, targets, expected):
    assert meets(times(0, 0.0, 1.0, 2.0, 4.0, **asked), targets) is expected


def test_one_token_has_no_tpot():
    assert math.isnan(times(0, 0.0, 1.0).tpot_s) and meets(times(0, 0.0, 1.0), Targets(tpot_s=0.001))


def steps(noise):
    drawn = random.Random(0)
    found = []
    for number in range(200):
        requests, context = drawn.randint(1, 8), drawn.randint(10, 4000)
        seconds = (0.02 + 0.003 * requests + 1e-6 * context) * (1 + noise * drawn.random())
        found.append(StepRun(2 * number, Phase.DECODE, 0.0, seconds, requests, requests, float(context)))
        tokens = drawn.randint(1, 512)
        attention = tokens * (context + tokens / 2)
        seconds = (0.05 + 0.001 * tokens + 1e-8 * attention) * (1 + noise * drawn.random())
        found.append(StepRun(2 * number + 1, Phase.PREFILL, 0.0, seconds, 1, tokens, attention))
    return found


def test_step_times_are_found():
    found = fit_step_times(steps(0.0), "log")
    assert found.decode == pytest.approx((0.02, 0.003, 1e-6)) and found.prefill == pytest.approx((0.05, 0.001, 1e-8))
    assert found.decode_error.p90 < 1e-9 and found.decode_error.num_held_out == 40
    assert found.seconds(Phase.DECODE, 4, 4, 1000.0) == pytest.approx(0.033)
    assert found.seconds(Phase.PREFILL, 1, 100, 0.0) == pytest.approx(0.15)


def test_what_steps_take_together_is_kept():
    measured = steps(2.0)
    found = fit_step_times(measured, "log")
    for phase in Phase:
        ours = sum(
            found.seconds(phase, each.num_requests, each.num_tokens, each.attention) for each in measured if each.phase is phase
        )
        assert ours == pytest.approx(sum(each.seconds for each in measured if each.phase is phase))
    assert 0.05 < found.decode_error.median < 0.6


def test_comparison():
    one = StepRun(1, Phase.PREFILL, 1.0, 1.0, 2, 16, 0.0, ((0, 8), (1, 8)))
    swapped = StepRun(1, Phase.PREFILL, 1.0, 1.0, 2, 16, 0.0, ((1, 8), (0, 8)))
    other = StepRun(1, Phase.PREFILL, 1.0, 1.0, 2, 16, 0.0, ((0, 8), (2, 8)))
    untold = StepRun(1, Phase.PREFILL, 1.0, 1.0, 2, 16, 0.0)

    def found(recorded, predicted):
        measured = Run("log", (times(0, 0.0, 2.0, 4.0),), recorded)
        return compare(measured, Run("tested", (times(0, 0.0, 1.0, 2.0),), predicted))

    assert found((one,), (swapped,)).errors == dict(ttft_mean_s=-0.5, ttft_p95_s=-0.5, tpot_mean_s=-0.5, tokens_per_s=1.0)
    assert found((one,), (swapped,)).first_difference is None
    assert found((untold,), (other,)).first_difference is None
    assert found((one, one), (one, other)).first_difference == StepDifference(
        1, "prefill of 2 requests (0, 1), 16 tokens", "prefill of 2 requests (0, 2), 16 tokens"
    )
    assert found((one,), (one, one)).first_difference.recorded is None
