"""Prompts or streams next: what is on the device, who would be late in a step with others, decode steps in a row."""

import math

import pytest

from sagellm.core.hooks import Phase, RequestView, StepResult
from sagellm.core.scheduling import ServiceLevel
from sagellm.scheduler_ir.strategies.hybrid import Hybrid
from sagellm.scheduler_ir.strategies.slo_aware import SloAware
from tests.scheduler_ir import made
from tests.scheduler_ir.strategies.loads import request, run

DECODE_S, TOKEN_S = 0.02, 0.001


def taught(strategy, pair_s=0.0):
    for number in range(60):
        tokens, context = 100 + 30 * number, 50 * (number % 40)
        seconds = TOKEN_S * tokens + pair_s * tokens * (context + tokens / 2)
        strategy.on_step_end(StepResult(0, Phase.PREFILL, 1, tokens, 0.0, seconds, context))
        strategy.on_step_end(StepResult(0, Phase.DECODE, 1 + number % 4, 1 + number % 4, 0.0, DECODE_S))
    return strategy


def stream(first_s, generated=10, tpot_s=0.1):
    return RequestView(
        1, Phase.DECODE, 60, 59, generated, 4, 0.0, service=ServiceLevel(tpot_s=tpot_s), max_new_tokens=500,
        first_token_s=first_s, last_token_s=10.0,
    )  # fmt: skip


def prompt(name, tokens=1000, ttft_s=math.inf, computed=0):
    level = ServiceLevel(ttft_s=ttft_s)
    return RequestView(name, Phase.PREFILL, tokens, computed, 0, 0, 10.0, service=level, max_new_tokens=10)


def view(*requests, in_flight=0):
    return made.view(*requests, phase=Phase.PREFILL, free_blocks=1000, max_batch_size=8, num_in_flight=in_flight, now_s=10.0)


@pytest.mark.parametrize("strategy", [SloAware, Hybrid])
def test_who_is_on_the_device_decodes_still(strategy):
    strategy = taught(strategy(rescue_every=1000, max_decodes=4))
    assert strategy.decide(view(prompt(2, ttft_s=5.0), in_flight=1)).phase is Phase.DECODE
    assert strategy.decide(view(prompt(2, ttft_s=1.01), in_flight=1)).phase is Phase.PREFILL  # it cannot wait
    assert strategy.decide(view(prompt(2, ttft_s=5.0))).phase is Phase.PREFILL
    phases = [strategy.decide(view(prompt(2, ttft_s=5.0), in_flight=1)).phase for _ in range(6)]
    assert phases.index(Phase.PREFILL) == 4  # nor for ever


def test_what_was_computed_before_costs_time():
    strategy = taught(SloAware(rescue_every=1000), pair_s=1e-6)
    late_in_s = 0.4  # for 300 tokens on their own, not for 300 behind 3,000
    rows = stream(10.0 - 1.0 + late_in_s + DECODE_S), prompt(2, 300, 9.0)
    assert strategy.decide(view(*rows)).phase is Phase.PREFILL
    assert strategy.decide(view(rows[0], prompt(2, 3300, 9.0, computed=3000))).phase is Phase.DECODE


@pytest.mark.parametrize("strategy", [SloAware, Hybrid])
def test_an_urgent_prompt_is_in_no_step_with_long_ones(strategy):
    strategy = taught(strategy(rescue_every=1000))
    rows = prompt(1, 100, 0.3), prompt(2, 150, 9.0), prompt(3, 2000, 9.0), prompt(4, 500)
    budget = strategy.decide(view(*rows)).token_budget
    assert 250 <= budget <= 305
    assert strategy.decide(view(*rows[1:3])).token_budget in (None, 4096)


def test_urgent_prompts_that_come_with_long_ones_are_in_time():
    short = [request(2 * number, 5.0 * number, 100, 5, ttft_s=0.2) for number in range(1, 6)]
    long = [request(2 * number + 1, 5.0 * number, 1500, 5, ttft_s=5.0) for number in range(1, 6)]
    run("slo_aware", [*short, *long])
    assert max(each.ttft_s for each in short[1:]) < 0.2 and max(each.ttft_s for each in long) < 5


def test_hybrid_counts_every_decode_step_while_somebody_waits():
    strategy = taught(Hybrid(target_itl_s=0.2, rescue_every=1000, max_decodes=3))
    strategy.on_step_end(StepResult(0, Phase.PREFILL, 1, 100, 10.0, 0.1))
    late = stream(10.0 - 1.0 + 2 * DECODE_S)
    late = late._replace(last_token_s=9.85)  # the chunk's turn is over; after that the stream is late
    phases = []
    for _ in range(6):
        phases.append(strategy.decide(view(late, prompt(2, 1000, 9.0))).phase)
        strategy.on_step_end(StepResult(0, phases[-1], 1, 1, 10.0, DECODE_S))
    assert phases.index(Phase.PREFILL) == 3
