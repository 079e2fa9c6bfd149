"""Costs are found again from steps that were made with them, and read back from JSON."""

import json
import random

import pytest

from sagellm.core.errors import PlanError, PolicyError
from sagellm.kv_policy.migration.calibrate import calibrate_copies
from sagellm.kv_policy.migration.cost_model import Link
from sagellm.scheduler_ir.pd_costs import PDCosts, fit_costs, fit_link, read_steps

TRUE = PDCosts(
    prefill_step_s=0.02, prefill_token_s=2e-3, prefill_pair_s=3e-7, decode_step_s=0.01, decode_request_s=4e-3,
    decode_context_s=5e-7, interference=0.8,
)  # fmt: skip


def step(phase, requests, tokens, context, seconds):
    return {
        "event": "step", "phase": phase, "requests": requests, "tokens": tokens, "context": context, "seconds": seconds
    }  # fmt: skip


def made_steps(count=200):
    """As an engine would write them whose steps cost what TRUE says, its clock late by 0.8 of each prefill."""
    draw = random.Random(3)
    now_s, steps = 1.0, []
    for number in range(count):
        if number % 3 == 2:
            tokens, context = draw.randint(16, 2000), draw.choice([0, 0, 512, 2048])
            seconds = TRUE.prefill_s(tokens, context)
            steps.append(step("prefill", 1, tokens, context, seconds))
            now_s += TRUE.interference * seconds
        else:
            requests = draw.randint(1, 30)
            context = requests * draw.randint(50, 3000)
            seconds = TRUE.decode_s(requests, context)
            steps.append(step("decode", requests, requests, context, seconds))
            now_s += seconds
        steps[-1]["t_ns"] = round(now_s * 1e9)
    return steps


def test_the_costs_of_made_steps_are_found_again():
    found = fit_costs(made_steps(), transfers=[(size, 2e-4 + size / 5e8) for size in range(10**5, 10**7, 10**5)])
    for name in (
        "prefill_step_s", "prefill_token_s", "prefill_pair_s", "decode_step_s", "decode_request_s", "decode_context_s",
        "interference",
    ):  # fmt: skip
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert found.link.latency_s == pytest.approx(2e-4) and found.link.bytes_per_s == pytest.approx(5e8)
    assert set(found.errors) == {"prefill", "decode", "transfer"} and found.errors["decode"].p90 < 1e-6


def test_what_was_not_measured_keeps_its_default():
    found = fit_costs([step for step in made_steps() if step["phase"] == "decode"], transfers=2e9, kv_bytes_per_token=7)
    assert found.prefill_token_s == PDCosts().prefill_token_s and found.interference == 1.0
    assert found.link == Link(latency_s=0.0, bytes_per_s=2e9) and found.kv_bytes_per_token == 7


def test_json_there_and_back():
    found = fit_costs(made_steps(), links={"a->b": Link(latency_s=1.0, bytes_per_s=8.0)})
    assert PDCosts.from_json(found.to_json()) == found
    assert found.transfer_s("a", "b", 16) == 3.0 and found.transfer_s("b", "a", 0) == found.link.latency_s


@pytest.mark.parametrize("text, says", [
    ("{", "JSON"), ('{"speed": 1}', "speed"), ('{"prefill_step_s": -1}', "prefill_step_s"),
    ('{"link": {"latency_s": 0, "bytes_per_s": 0}}', "link.bytes_per_s"), ('{"kv_bytes_per_token": 0}', "kv_bytes_per_token"),
])  # fmt: skip
def test_bad_json(text, says):
    with pytest.raises(PlanError, match=says):
        PDCosts.from_json(text)


def test_steps_are_read_from_an_event_log(tmp_path):
    log = tmp_path / "events.jsonl"
    steps = made_steps(30)
    others = [{"event": "open"}, {"event": "end", "reason": "step"}]
    log.write_text("".join(json.dumps(line) + "\n" for line in [*others, *steps]) + '{"event": "step", "se')
    assert read_steps(log) == steps
    assert fit_costs(read_steps(log)).decode_request_s == pytest.approx(TRUE.decode_request_s, rel=1e-3)
    log.write_text('{"event": "open"}\n')
    with pytest.raises(PlanError, match="no line of a step"):
        read_steps(log)
    with pytest.raises(PlanError, match="cannot read"):
        read_steps(tmp_path / "none")


def test_bad_measurements():
    with pytest.raises(PlanError, match="'context'"):
        fit_costs([{"phase": "decode", "requests": 1, "tokens": 1, "seconds": 1.0}])
    with pytest.raises(PlanError, match="above 0"):
        fit_link(0.0)
    with pytest.raises(PlanError, match="same time"):
        fit_link([(size, 1.0) for size in range(1, 20)])
    with pytest.raises(PolicyError, match="at least 5"):
        fit_link([(1, 1.0)])


def test_a_link_from_copies_of_this_machine():
    samples = calibrate_copies(sizes=(2**12, 2**20, 2**24), repeats=3)["gpu->cpu"]
    link, error = fit_link(samples)
    assert link.bytes_per_s > 1e6 and error.num_samples == 9
