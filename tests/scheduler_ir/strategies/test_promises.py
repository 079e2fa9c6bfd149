"""What each strategy promises, on the virtual queue: figures of its clock, so that nothing is timed."""

import random

import pytest

from sagellm.scheduler_ir.contract.scenarios import random_jobs
from sagellm.scheduler_ir.contract.virtual_queue import StepCosts
from sagellm.scheduler_ir.strategies.adaptive import Adaptive
from sagellm.scheduler_ir.strategies.priority import Priority
from sagellm.scheduler_ir.strategies.shortest import Shortest
from tests.scheduler_ir.strategies.loads import goodput, job, mixed, quantile, run


@pytest.mark.parametrize("num_blocks", [2000, 160, 90])
@pytest.mark.parametrize("seed", range(4))
def test_fifo_is_the_engines_own_schedule(seed, num_blocks):
    def tokens(strategy):
        jobs = random_jobs(random.Random(seed), 60)
        queue = run(strategy, jobs, num_blocks=num_blocks, token_budget=512, max_batch_size=8)
        return [each.token_s for each in jobs], queue.phases, queue.num_preempted

    assert tokens("fifo") == tokens(None) != tokens("priority")


def in_a_flood(ageing_s):
    """A request of priority 10 among urgent ones, four times as many as the queue can serve."""
    jobs = [job(0, 1.0, priority=10)]
    jobs += [job(number, number * 0.02, 100, 20, priority=-10) for number in range(1, 400)]
    run(Priority(ageing_s=ageing_s), jobs, max_batch_size=8)
    return jobs[0], jobs[1:]


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
        queue = run(strategy, mixed(seed, priorities=(-10, 10)))
        return quantile([each.ttft_s for each in queue.jobs.values() if each.prompt < 200], 0.95)

    assert chats("fifo") > 3 * chats("priority")


@pytest.mark.parametrize(("strategy", "victim"), [("priority", 0), ("fifo", 2)])
def test_memory_is_taken_from_the_least_urgent(strategy, victim):
    jobs = [job(1, 0.0, 60, 40, priority=5), job(2, 0.1, 60, 40), job(3, 0.2, 60, 40, priority=-5)]
    queue = run(strategy, jobs, num_blocks=14, max_batch_size=8)
    gaps = [max(each.gaps_s) for each in jobs]
    assert queue.num_preempted and gaps[victim] > 0.1 > max(gaps[:victim] + gaps[victim + 1 :])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", ["slo_aware", "hybrid"])
def test_goodput_on_a_mixed_load(strategy, seed):
    fifo, aware = run("fifo", mixed(seed)), run(strategy, mixed(seed))
    assert goodput(aware) >= 1.5 * goodput(fifo) > 0
    assert aware.now_s < 1.2 * fifo.now_s  # and everything is done


@pytest.mark.parametrize(("strategy", "num_good"), [("slo_aware", 9), ("fifo", 1)])
def test_what_cannot_be_in_time_goes_behind_and_is_done(strategy, num_good):
    lost = job(99, 0.0005, 2000, 10, ttft_s=0.1)
    jobs = [lost, *(job(number, 0.001 * number, 100, 5, ttft_s=0.5) for number in range(9))]
    queue = run(strategy, jobs, max_batch_size=4, token_budget=512)
    assert goodput(queue) == num_good and lost.token_s
    assert (lost.end_s == queue.now_s) == (strategy == "slo_aware")


def test_a_late_request_gets_its_turn_in_a_flood():
    late = job(0, 0.0, 2000, 10, ttft_s=0.1)
    flood = [job(number, number * 0.02, 60, 10, ttft_s=0.5) for number in range(1, 1000)]
    run("slo_aware", [late, *flood], max_batch_size=8, token_budget=512, until_s=10)
    assert late.token_s and late.token_s[0] < 5


def test_deadlines_count():
    jobs = [job(number, 0.001 * number, 400, 30, deadline_s=20.0) for number in range(8)]
    jobs.append(job(8, 0.01, 400, 30, deadline_s=1.4))
    run("slo_aware", jobs, max_batch_size=2)
    assert jobs[8].end_s <= 1.5 < jobs[1].end_s


CHEAP = StepCosts(prefill_s=0.002, prompt_token_s=2.5e-4, decode_s=0.02, request_s=5e-4)
LEARNED_S = 3.0


def gaps_beside_a_document(strategy, num_streams=6, **service):
    """Of streams while a prompt of 4,096 tokens is computed, after another that it learns from, and when all is done."""
    streams = [job(number, 0.0, 40, 400, **service) for number in range(num_streams)]
    queue = run(strategy, [*streams, job(98, 1.0, 2000, 1), job(99, LEARNED_S, 4096, 20)], costs=CHEAP)
    gaps = [
        gap for each in streams for gap, at_s in zip(each.gaps_s, each.token_s[1:], strict=True) if at_s > LEARNED_S
    ]
    return gaps, queue.now_s


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
    alone = run("adaptive", [job(0, 0.0, 4096, 1)])
    assert len(alone.phases) == 1
    jobs = [job(0, 0.0, 40, 400), job(1, 1.0, 2000, 1), job(2, LEARNED_S, 4096, 20)]
    run(Adaptive(target_itl_s=0.03, max_overhead=0.05), jobs)  # 10 ms a step are at most 5% of it if the tokens take 190 ms
    gaps = [gap for gap, at_s in zip(jobs[0].gaps_s, jobs[0].token_s[1:], strict=True) if at_s > LEARNED_S]
    assert 0.15 < max(gaps) < 0.25


def shares(strategy, load=10):
    """Tokens of both tenants while both have requests that wait; one sends `load` times what the other does."""
    jobs = [job(number, number * 0.1, 100, 30, tenant="small") for number in range(120)]
    jobs += [job(1000 + number, number * 0.1 / load, 100, 30, tenant="large") for number in range(120 * load)]
    run(strategy, jobs, max_batch_size=8, until_s=12)
    got = dict.fromkeys(("small", "large"), 0)
    for each in jobs:
        got[each.service.tenant_id] += each.computed + len(each.token_s) if each.end_s == float("inf") else 130
    return got["small"] / got["large"]


def test_fair_shares_are_within_a_tenth():
    assert 0.9 <= shares("fair") <= 1.1
    assert shares("fifo") < 0.2


def test_a_tenant_that_comes_back_has_saved_nothing_up():
    jobs = [job(number, 0.0, 100, 30, tenant="steady") for number in range(400)]
    jobs += [job(1000, 0.0, 100, 30, tenant="back")]
    jobs += [job(1001 + number, 10.0, 100, 30, tenant="back") for number in range(200)]
    run("fair", jobs, max_batch_size=8, until_s=20)
    steady = sum(10 < each.end_s <= 20 for each in jobs[:400])
    back = sum(10 < each.end_s <= 20 for each in jobs[401:])
    assert 0.85 <= back / steady <= 1.15


def test_shortest_first_has_the_least_mean_and_ages():
    def mean(strategy):
        jobs = [job(n, 0.05 * n, 60, 80 if n % 4 == 0 else 8, tenant="long" if n % 4 == 0 else "short") for n in range(200)]
        for each in jobs:
            each.max_new_tokens = 100  # the same for all: what tells them apart is learned
        run(strategy, jobs, max_batch_size=4)
        return sum(each.end_s - each.arrival_s for each in jobs) / len(jobs)

    assert mean("shortest") < 0.8 * mean("fifo")


def test_shortest_ages():
    long = job(0, 0.5, 1000, 100)
    flood = [job(number, number * 0.02, 60, 5) for number in range(1, 300)]
    run(Shortest(ageing=1.0), [long, *flood], max_batch_size=4)
    late = [each for each in flood if each.arrival_s > 3.0]  # it is 2.5 s of work
    assert len(late) > 100 and all(each.token_s[0] >= long.token_s[0] for each in late)
    assert sum(each.token_s[0] < long.token_s[0] for each in flood) > 50
