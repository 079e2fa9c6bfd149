"""Tests of the promises of each strategy, on the virtual engine. Figures are from the engine's clock, so nothing is timed."""

import random

import pytest

from sagellm.scheduler_ir.contract.scenarios import random_requests
from sagellm.scheduler_ir.simulation.base import LinearCosts
from sagellm.scheduler_ir.strategies.adaptive import Adaptive
from sagellm.scheduler_ir.strategies.priority import Priority
from sagellm.scheduler_ir.strategies.shortest import Shortest
from tests.scheduler_ir.strategies.loads import goodput, mixed, quantile, request, run


@pytest.mark.parametrize("num_blocks", [2000, 160, 90])
@pytest.mark.parametrize("seed", range(4))
def test_fifo_is_the_engines_own_schedule(seed, num_blocks):
    def tokens(strategy):
        requests = random_requests(random.Random(seed), 60)
        engine = run(strategy, requests, num_blocks=num_blocks, max_prefill_tokens=512, max_batch_size=8)
        return [each.token_s for each in requests], [step.phase for step in engine.steps], engine.num_preempted

    assert tokens("fifo") == tokens(None) != tokens("priority")


def in_a_flood(ageing_s):
    """A request of priority 10 among urgent ones, four times as many as the queue can serve."""
    requests = [request(0, 1.0, priority=10)]
    requests += [request(number, number * 0.02, 100, 20, priority=-10) for number in range(1, 400)]
    run(Priority(ageing_s=ageing_s), requests, max_batch_size=8)
    return requests[0], requests[1:]


def test_priority_bound_on_waiting():
    bound_s = 1.0 + 20 * 0.2
    low, urgent = in_a_flood(0.2)
    late = [each for each in urgent if each.arrival_s > bound_s]
    assert len(late) > 100 and all(each.token_s[0] >= low.token_s[0] for each in late)
    assert sum(1.0 < each.arrival_s <= bound_s and each.token_s[0] < low.token_s[0] for each in urgent) > 100
    starved, urgent = in_a_flood(1000)  # with levels that age never makes up for it comes last
    assert starved.token_s[0] >= max(each.token_s[0] for each in urgent) and starved.token_s[0] > 1.3 * low.token_s[0]


@pytest.mark.parametrize("seed", range(2))
def test_priority_cuts_the_urgent_ones_wait(seed):
    def chats(strategy):
        engine = run(strategy, mixed(seed, priorities=(-10, 10)))
        return quantile([each.ttft_s for each in engine.requests.values() if each.prompt_tokens < 200], 0.95)

    assert chats("fifo") > 2.5 * chats("priority")


@pytest.mark.parametrize(("strategy", "victim"), [("priority", 0), ("fifo", 2)])
def test_memory_is_taken_from_the_least_urgent(strategy, victim):
    requests = [request(1, 0.0, 60, 40, priority=5), request(2, 0.1, 60, 40), request(3, 0.2, 60, 40, priority=-5)]
    engine = run(strategy, requests, num_blocks=14, max_batch_size=8)
    gaps = [max(each.gaps_s) for each in requests]
    assert engine.num_preempted and gaps[victim] > 0.1 > max(gaps[:victim] + gaps[victim + 1 :])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("strategy", "gain"), [("slo_aware", 1.3), ("hybrid", 1.75)])
def test_goodput_on_a_mixed_load(strategy, gain, seed):
    fifo, aware = run("fifo", mixed(seed)), run(strategy, mixed(seed))
    assert goodput(aware) >= gain * goodput(fifo) > 0
    assert aware.now_s < 1.25 * fifo.now_s  # and everything is done


@pytest.mark.parametrize(("strategy", "num_good"), [("slo_aware", 9), ("fifo", 1)])
def test_what_cannot_be_in_time_goes_behind_and_is_done(strategy, num_good):
    lost = request(99, 0.0005, 2000, 10, ttft_s=0.1)
    requests = [lost, *(request(number, 0.001 * number, 100, 5, ttft_s=0.5) for number in range(9))]
    engine = run(strategy, requests, max_batch_size=4, max_prefill_tokens=512)
    assert goodput(engine) == num_good and lost.token_s
    assert (lost.end_s == engine.now_s) == (strategy == "slo_aware")


def test_a_late_request_gets_its_turn_in_a_flood():
    late = request(0, 0.0, 2000, 10, ttft_s=0.1)
    flood = [request(number, number * 0.02, 60, 10, ttft_s=0.5) for number in range(1, 1000)]
    run("slo_aware", [late, *flood], max_batch_size=8, max_prefill_tokens=512, until_s=10)
    assert late.token_s and late.token_s[0] < 5


def test_deadlines_count():
    requests = [request(number, 0.001 * number, 400, 30, deadline_s=20.0) for number in range(8)]
    requests.append(request(8, 0.01, 400, 30, deadline_s=1.4))
    run("slo_aware", requests, max_batch_size=2)
    assert requests[8].end_s <= 1.5 < requests[1].end_s


CHEAP = LinearCosts((0.002, 2.5e-4, 1e-9), (0.02, 5e-4, 0.0))
LEARNED_S = 3.0


def gaps_beside_a_document(strategy, num_streams=6, **service):
    """Return the gaps between tokens of streams while a prompt of 4,096 tokens is computed, and the time when all is done.

    The strategy learns from an earlier prompt.
    """
    streams = [request(number, 0.0, 40, 400, **service) for number in range(num_streams)]
    engine = run(strategy, [*streams, request(98, 1.0, 2000, 1), request(99, LEARNED_S, 4096, 20)], costs=CHEAP)
    gaps = [
        gap for each in streams for gap, at_s in zip(each.gaps_s, each.token_s[1:], strict=True) if at_s > LEARNED_S
    ]
    return gaps, engine.now_s


@pytest.mark.parametrize("target_s", [0.08, 0.15, 0.3])
def test_adaptive_keeps_the_gap_between_tokens(target_s):
    gaps, end_s = gaps_beside_a_document(Adaptive(target_itl_s=target_s, max_overhead=0.05))
    before, upstream_s = gaps_beside_a_document(None)
    assert 0.7 * target_s < max(gaps) <= 1.02 * target_s and max(before) > 3 * max(gaps)
    assert end_s <= 1.05 * upstream_s


def test_adaptive_takes_the_target_from_what_is_asked_or_from_the_steps():
    assert 0.08 < max(gaps_beside_a_document(Adaptive(), tpot_s=0.12)[0]) <= 1.02 * 0.12
    longer = Adaptive(max_overhead=0.05)  # the smallest chunk may be longer
    assert 0.05 < max(gaps_beside_a_document(longer)[0]) <= 1.15 * 3 * 0.023


def test_adaptive_does_not_cut_where_nobody_decodes_or_chunks_cost_too_much():
    alone = run("adaptive", [request(0, 0.0, 4096, 1)])
    assert len(alone.steps) == 1
    requests = [request(0, 0.0, 40, 400), request(1, 1.0, 2000, 1), request(2, LEARNED_S, 4096, 20)]
    run(Adaptive(target_itl_s=0.03, max_overhead=0.05), requests)  # 10 ms a step are at most 5% of it if the tokens take 190 ms
    gaps = [gap for gap, at_s in zip(requests[0].gaps_s, requests[0].token_s[1:], strict=True) if at_s > LEARNED_S]
    assert 0.15 < max(gaps) < 0.25


def shares(strategy, load=10):
    """Tokens of both tenants while both have requests that wait; one sends `load` times what the other does."""
    requests = [request(number, number * 0.1, 100, 30, tenant="small") for number in range(120)]
    requests += [request(1000 + number, number * 0.1 / load, 100, 30, tenant="large") for number in range(120 * load)]
    run(strategy, requests, max_batch_size=8, until_s=12)
    got = dict.fromkeys(("small", "large"), 0)
    for each in requests:
        got[each.service.tenant_id] += each.num_computed + len(each.token_s) if each.end_s == float("inf") else 130
    return got["small"] / got["large"]


def test_fair_shares_are_within_a_tenth():
    assert 0.9 <= shares("fair") <= 1.1
    assert shares("fifo") < 0.2


def test_a_tenant_that_comes_back_has_saved_nothing_up():
    requests = [request(number, 0.0, 100, 30, tenant="steady") for number in range(400)]
    requests += [request(1000, 0.0, 100, 30, tenant="back")]
    requests += [request(1001 + number, 10.0, 100, 30, tenant="back") for number in range(200)]
    run("fair", requests, max_batch_size=8, until_s=20)
    steady = sum(10 < each.end_s <= 20 for each in requests[:400])
    back = sum(10 < each.end_s <= 20 for each in requests[401:])
    assert 0.85 <= back / steady <= 1.15


def test_shortest_first_has_the_least_mean_and_ages():
    def mean(strategy):
        kinds = {True: (80, "long"), False: (8, "short")}
        answers = [kinds[number % 4 == 0] for number in range(200)]
        requests = [request(n, 0.05 * n, 60, output, tenant=tenant) for n, (output, tenant) in enumerate(answers)]
        for each in requests:
            each.max_new_tokens = 100  # the same for all: what tells them apart is learned
        run(strategy, requests, max_batch_size=4)
        return sum(each.end_s - each.arrival_s for each in requests) / len(requests)

    assert mean("shortest") < 0.8 * mean("fifo")


def test_shortest_ages():
    long = request(0, 0.5, 1000, 100)
    flood = [request(number, number * 0.02, 60, 5) for number in range(1, 300)]
    run(Shortest(ageing=1.0), [long, *flood], max_batch_size=4)
    late = [each for each in flood if each.arrival_s > 3.0]  # it is 2.5 s of work
    assert len(late) > 100 and all(each.token_s[0] >= long.token_s[0] for each in late)
    assert sum(each.token_s[0] < long.token_s[0] for each in flood) > 50
