"""Chunks that are chosen while the one before is on the device, and how small one may be."""

import math

import pytest

from sagellm.core.hooks import Phase, RequestView, StepResult
from sagellm.core.scheduling import ServiceLevel
from sagellm.core.step_times import StepTimes
from sagellm.scheduler_ir.simulation.base import LinearCosts
from sagellm.scheduler_ir.strategies.adaptive import Adaptive
from sagellm.scheduler_ir.strategies.chunking import ChunkSizer
from tests.scheduler_ir import made
from tests.scheduler_ir.strategies.loads import request, run

DECODE_S, TOKEN_S = 0.02, 0.001


def teach(observe):
    for number in range(60):
        tokens = 100 + 30 * number
        observe(StepResult(0, Phase.PREFILL, 1, tokens, 0.0, TOKEN_S * tokens))
        observe(StepResult(0, Phase.DECODE, 1 + number % 4, 1 + number % 4, 0.0, DECODE_S))


def stream(last_s, tpot_s=math.inf):
    return RequestView(
        1, Phase.DECODE, 60, 59, 10, 4, 0.0, service=ServiceLevel(tpot_s=tpot_s), max_new_tokens=500,
        first_token_s=0.0, last_token_s=last_s,
    )  # fmt: skip


def prompt(name, tokens=1000):
    return RequestView(name, Phase.PREFILL, tokens, 0, 0, 0, 0.1, max_new_tokens=10)


def view(*requests, in_flight=0, now_s=1.0):
    return made.view(*requests, phase=Phase.PREFILL, free_blocks=1000, max_batch_size=8, num_in_flight=in_flight, now_s=now_s)


def test_a_chunk_on_the_device_counts_as_time_that_streams_wait():
    strategy = Adaptive(target_itl_s=0.2)
    teach(strategy.on_step_end)
    strategy.on_step_end(StepResult(0, Phase.DECODE, 1, 1, 1.0, DECODE_S))
    first = strategy.decide(view(stream(1.0), prompt(2), prompt(3)))
    assert first.phase is Phase.PREFILL and first.chunk_tokens[2] > 140
    ahead = strategy.decide(view(stream(1.0), prompt(3), in_flight=1))
    assert ahead.phase is Phase.DECODE
    # It was not carried out: the chunk is done, and the stream comes now.
    strategy.on_step_end(StepResult(1, Phase.PREFILL, 1, 160, 1.16, 0.16))
    assert strategy.decide(view(stream(1.0), prompt(2), prompt(3), now_s=1.16)).phase is Phase.DECODE


def test_a_stream_on_the_device_keeps_its_target():
    strategy = Adaptive()
    teach(strategy.on_step_end)
    asked = strategy.decide(view(stream(1.0, 0.4), prompt(2, 4000))).token_budget
    strategy.on_step_end(StepResult(1, Phase.PREFILL, 1, asked, 1.3, TOKEN_S * asked))
    assert strategy.decide(view(stream(1.0, 0.4), prompt(2, 4000), now_s=1.4)).phase is Phase.DECODE
    ahead = strategy.decide(view(prompt(2, 4000), in_flight=1, now_s=1.4))
    assert ahead.token_budget == pytest.approx(asked, rel=0.1) and asked > 300


def test_no_chunk_is_a_crumb():
    times = StepTimes()
    for number in range(60):  # a step costs as good as nothing besides its tokens
        times.observe(StepResult(0, Phase.PREFILL, 1, 100 + 30 * number, 0.0, TOKEN_S * (100 + 30 * number)))
    sizer = ChunkSizer(times, 0.001, 0.9)
    sizer.choose(view(stream(1.0), prompt(2)), [prompt(2)])
    assert sizer.chunk >= 32


def test_two_documents_do_not_double_the_gap_on_an_engine_that_chooses_ahead():
    streams = [request(number, 0.0, 40, 600) for number in range(4)]
    documents = [request(number, at_s, 3000, 5) for number, at_s in ((8, 1.0), (10, 5.0), (11, 5.0), (12, 5.01))]
    costs = LinearCosts((0.002, 2.5e-4, 0.0), (0.02, 5e-4, 0.0))
    strategy = Adaptive(target_itl_s=0.1)
    run(strategy, [*streams, *documents], costs=costs, max_prefill_tokens=8192, max_batch_size=16)
    gaps = [
        gap for each in streams for gap, before_s in zip(each.gaps_s, each.token_s, strict=False) if before_s > 4.9
    ]  # fmt: skip
    assert 0.05 < max(gaps) < 1.1 * 0.1
