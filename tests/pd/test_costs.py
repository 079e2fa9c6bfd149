"""Costs fitted while engines run."""

import pytest

from sagellm.comm_backend.group_messages import StepCost
from sagellm.pd.costs import OnlineCosts
from sagellm.scheduler_ir.pd_costs import PDCosts


def prefill(num, seconds=None, context=0):
    seconds = 0.02 + 2e-4 * num if seconds is None else seconds
    return StepCost(kind="prefill", num_tokens=num, num_requests=1, num_context=context, seconds=seconds)


def test_before_anything_is_measured_the_prior_holds():
    costs = OnlineCosts()
    assert costs.of("a") == PDCosts() and costs.report("a")["prefill"]["source"] == "prior"
    costs.observe("a", [prefill(100)] * 4)  # too few
    assert costs.of("a") == PDCosts()


def test_a_fit_finds_what_made_the_samples():
    costs = OnlineCosts()
    costs.observe("a", [prefill(num) for num in range(10, 500, 10)])
    decode = [StepCost(kind="decode", num_requests=num, num_tokens=num, num_context=9 * num, seconds=0.01 + 1e-3 * num)
              for num in range(1, 30)]  # fmt: skip
    costs.observe("a", decode)
    costs.observe("a", [StepCost(kind="transfer", num_bytes=10**6 * num, seconds=1e-3 + 1e-3 * num) for num in range(1, 30)])
    found = costs.of("a")
    assert found.prefill_s(200) == pytest.approx(0.06, rel=0.02)
    assert found.decode_s(10, 90) == pytest.approx(0.02, rel=0.02)
    assert found.transfer_s("a", "b", 10**7) == pytest.approx(0.011, rel=0.02)
    assert found.interference == PDCosts().interference  # nothing that was measured tells it
    report = costs.report("a")
    assert report["prefill"]["source"] == "measured" and report["prefill"]["median_error"] < 0.02


def test_an_engine_without_samples_has_what_all_others_show():
    costs = OnlineCosts()
    costs.observe("a", [prefill(num) for num in range(10, 500, 10)])
    assert costs.of("b").prefill_s(200) == pytest.approx(0.06, rel=0.02)
    assert costs.report("b")["prefill"]["source"] == "measured on all engines"
    costs.forget("a")
    assert costs.report("a")["prefill"]["source"] == "measured on all engines"


def test_samples_of_one_size_scale_the_prior():
    """They cannot tell a fixed time from one that grows: two tokens must not cost as much as five hundred."""
    costs = OnlineCosts()
    costs.observe("a", [prefill(500, seconds=5 * PDCosts().prefill_s(500))] * 10)
    found = costs.of("a")
    assert found.prefill_s(500) == pytest.approx(5 * PDCosts().prefill_s(500))
    assert found.prefill_s(2) == pytest.approx(5 * PDCosts().prefill_s(2))
    costs.observe("a", [StepCost(kind="transfer", num_bytes=10**6, seconds=0.01)] * 10)
    assert costs.of("a").transfer_s("a", "b", 10**6) == pytest.approx(0.01)


def test_an_engine_that_has_seen_one_size_scales_what_all_show():
    """A decode engine computes the last token of each prompt, and tells nothing of long ones."""
    costs = OnlineCosts()
    costs.observe("p", [prefill(num) for num in range(10, 500, 10)])
    costs.observe("d", [prefill(1)] * 10)
    assert costs.of("d").prefill_s(400) == pytest.approx(0.1, rel=0.05)


def test_samples_that_no_measurement_has_are_left_out():
    costs = OnlineCosts()
    bad = [prefill(10, seconds=0.0), prefill(10, seconds=1e9), prefill(-1), StepCost(kind="transfer", seconds=1.0)]
    costs.observe("a", bad * 10)
    assert costs.report("a")["prefill"]["num_samples"] == 0 and costs.of("a") == PDCosts()


def test_it_follows_a_change_and_its_memory_is_bounded():
    costs = OnlineCosts()
    costs.observe("a", [prefill(num) for num in range(10, 500, 10)])
    for _ in range(20):
        costs.observe("a", [prefill(num, seconds=0.1 + 1e-3 * num) for num in range(10, 500, 10)])
    assert costs.of("a").prefill_s(200) == pytest.approx(0.3, rel=0.02)
    assert costs.report("a")["prefill"]["num_samples"] == 512
