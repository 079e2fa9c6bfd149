"""Tests of the measures of strategies, on times that can be worked out by hand."""

import numpy as np
import pytest

from benchmarks.scheduling.measures import figures, gaps_during, is_met, shares
from benchmarks.scheduling.workloads import Job, burst, long_prompt, mixed, two_tenants


def job(arrival_s: float, group: str, prompt: int = 10, **service: float) -> Job:
    return Job(arrival_s, [5] * prompt, 3, group, service)


def test_targets_are_those_of_the_request():
    urgent = job(0, "chat", ttft_slo_ms=100, tpot_slo_ms=50)
    assert is_met(urgent, [0.1, 0.15, 0.2]) and not is_met(urgent, [0.11, 0.15, 0.2])
    assert not is_met(urgent, [0.1, 0.11, 0.21]), "on average"
    assert is_met(urgent, [0.1]) and is_met(job(0, "any"), [9.0, 99.0])


def test_figures_of_groups():
    jobs = [job(0.0, "a", ttft_slo_ms=100), job(1.0, "a", ttft_slo_ms=100), job(1.0, "b")]
    found = figures(jobs, [[0.1, 0.2, 0.4], [0.3, 0.4, 0.5], [1.0, 2.0, 3.0]])
    assert found["seconds"] == 4.0
    assert found["a"]["ttft_mean_s"] == pytest.approx(0.2) and found["a"]["ttft_max_s"] == 0.3
    assert found["a"]["goodput_per_s"] == 1 / 4 and found["all"]["goodput_per_s"] == 2 / 4
    assert found["a"]["met_share"] == 0.5 and found["all"]["tokens_per_s"] == pytest.approx(39 / 4)
    assert found["b"]["itl_p50_s"] == 1.0


def test_gaps_while_a_prompt_is_computed():
    jobs = [job(0.0, "stream"), job(2.0, "prompt")]
    gaps = gaps_during(jobs, [[1.0, 1.5, 2.5, 4.5, 4.75, 5.5], [3.0]], "stream", "prompt")
    assert gaps.tolist() == [1.0, 2.0, 0.25, 0.75], "those that end after its arrival and begin before its first token"


def test_shares_while_both_have_something_waiting():
    jobs = [job(0.0, "heavy"), job(0.0, "heavy"), job(0.0, "light")]
    assert shares(jobs, [[1.0, 2.0], [9.0], [2.0, 3.0]], ("heavy", "light")) == {"heavy": 12 / 23, "light": 11 / 23}


@pytest.mark.parametrize("make", [lambda seed: mixed(seed, 20, 2, 0.5), lambda seed: two_tenants(seed, 5),
                                  lambda seed: burst(seed, 30), lambda seed: long_prompt(seed, 3, 10, 100, 1.0)])  # fmt: skip
def test_workloads_are_the_same_for_a_seed(make):
    first, again, other = make(3), make(3), make(4)
    assert first == again != other
    assert all(each.prompt and each.new_tokens > 0 for each in first)
    assert np.all(np.diff([each.arrival_s for each in first]) >= 0)
