"""The order by slack, by hand: who is in time, who gives way, who has no target, whose turn it is."""

import math

import pytest

from sagellm.core.hooks import Phase, RequestView, StepResult
from sagellm.core.scheduling import ServiceLevel
from sagellm.core.step_times import StepTimes
from sagellm.scheduler_ir.strategies.slack import SlackOrder
from tests.scheduler_ir.made import view

TOKEN_S = 0.001  # a token of a prompt; steps cost nothing besides


@pytest.fixture(scope="module")
def times():
    times = StepTimes()
    for tokens in range(100, 4000, 50):
        times.observe(StepResult(0, Phase.PREFILL, 1, tokens, 0.0, TOKEN_S * tokens))
    return times


def waits(name, tokens, ttft_s=math.inf, arrival_s=0.0):
    return RequestView(
        name, Phase.PREFILL, tokens, 0, 0, 0, arrival_s, service=ServiceLevel(ttft_s=ttft_s), max_new_tokens=10
    )


def rank(times, requests, num_prefills=0, now_s=0.0):
    order = SlackOrder("test", times, math.inf, math.inf, 4)
    for _ in range(num_prefills):
        order.on_step_end(StepResult(0, Phase.PREFILL, 1, 1, 0.0))
    return order.rank(view(*requests, phase=Phase.PREFILL, max_batch_size=8, now_s=now_s))


def test_least_slack_first_then_no_target_then_too_late(times):
    requests = [waits(1, 100, 5.0), waits(2, 100), waits(3, 1000, 2.0), waits(4, 500, 0.3), waits(5, 100, 0.5)]
    ranked = rank(times, requests)
    assert [request.request_id for request in ranked.waiting] == [5, 3, 1, 2, 4]
    assert ranked.slack_s[3] == pytest.approx(1.0, abs=0.02) and ranked.slack_s[2] == math.inf and ranked.slack_s[4] < 0
    assert list(ranked.reasons) == [4]


def test_the_longest_gives_way_where_not_all_can_be_in_time(times):
    shorts = [waits(number, 200, 1.5) for number in range(1, 6)]
    ranked = rank(times, [waits(9, 1000, 1.2), *shorts])
    assert [request.request_id for request in ranked.waiting] == [1, 2, 3, 4, 5, 9] and list(ranked.reasons) == [9]


def test_one_that_is_lost_makes_nobody_else_give_way(times):
    ranked = rank(times, [waits(1, 1000, 1.8), waits(2, 100, 0.05)])
    assert [request.request_id for request in ranked.waiting] == [1, 2] and list(ranked.reasons) == [2]


def test_every_so_often_the_oldest_comes_first(times):
    requests = [waits(1, 500, 0.1, arrival_s=-1.0), waits(2, 100, 5.0), waits(3, 100)]
    assert [rank(times, requests, number).waiting[0].request_id for number in range(8)] == [2, 2, 2, 1] * 2
    assert rank(times, requests, 3).reasons[1] == "waited longest: its turn"


def test_a_stream_that_was_quick_has_time_left(times):
    def runs(name, generated, first_s=0.0, left=50):
        return RequestView(
            name, Phase.DECODE, 100 + generated, 100, generated, 7, 0.0, service=ServiceLevel(tpot_s=0.1),
            max_new_tokens=generated + left, first_token_s=first_s, last_token_s=1.0,
        )  # fmt: skip

    quick, slow, lost = runs(1, 20), runs(2, 11), runs(3, 5, left=1)
    ranked = rank(times, [quick, slow, lost], now_s=1.0)
    assert sorted(ranked.stream_slack_s) == pytest.approx([0.1 - ranked.decode_s, 1.0 - ranked.decode_s])


def test_defaults_are_for_those_that_ask_for_nothing(times):
    def due_s(request):
        order = SlackOrder("test", times, 1.0, 0.1, 4)
        ranked = order.rank(view(request, phase=Phase.PREFILL, max_batch_size=8))
        return ranked.due_s[request.request_id]

    assert due_s(waits(1, 100, 5.0)) == 5.0 and due_s(waits(1, 100, 0.5)) == 0.5 and due_s(waits(1, 100)) == 1.0
    stream = RequestView(
        1, Phase.DECODE, 104, 100, 4, 7, 0.0, service=ServiceLevel(tpot_s=0.5), max_new_tokens=50,
        first_token_s=1.0, last_token_s=1.0,
    )  # fmt: skip
    assert due_s(stream) == 3.0 and due_s(stream._replace(service=ServiceLevel())) == pytest.approx(1.4)


def test_a_limit_is_no_length(times):
    order = SlackOrder("test", times, math.inf, math.inf, 4)
    asks = RequestView(
        1, Phase.PREFILL, 100, 0, 0, 0, 0.0, service=ServiceLevel(deadline_s=20.0), max_new_tokens=30_000
    )
    seen = view(waits(2, 100), asks, phase=Phase.PREFILL, max_batch_size=8)
    assert [request.request_id for request in order.rank(seen).waiting] == [1, 2]
    before_s = order.rank(seen).due_s[1]
    for number in range(100, 200):  # answers of ten tokens come to their end
        row = RequestView(number, Phase.DECODE, 110, 109, 10, 7, 0.0, max_new_tokens=30_000)
        order.rank(view(row, max_batch_size=8))
        order.on_request_end(number)
    assert before_s < 19 < order.rank(seen).due_s[1] < 20


def test_most_are_in_time_in_the_order_in_which_they_are_due(times):
    # By slack the long one goes first (0.15 s against 0.2 s) and the short one is late; by due time both are in time.
    ranked = rank(times, [waits(1, 1000, 1.15), waits(2, 100, 0.3), waits(3, 2000, 0.5)])
    assert [request.request_id for request in ranked.waiting] == [2, 1, 3] and list(ranked.reasons) == [3]
