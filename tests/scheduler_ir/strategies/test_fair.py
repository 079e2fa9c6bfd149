"""Counters of tenants: who stands where when it begins to wait, and which are kept."""

from sagellm.core.hooks import Phase, RequestView, StepResult
from sagellm.core.scheduling import ServiceLevel
from sagellm.scheduler_ir.strategies.fair import MAX_ABSENT, Fair
from tests.scheduler_ir.made import view
from tests.scheduler_ir.strategies.loads import request, run


def row(name, tenant, phase=Phase.PREFILL):
    return RequestView(name, phase, 100, 0, 0, 0, float(name), service=ServiceLevel(tenant_id=tenant))


def see(fair, *requests, in_flight=0):
    return fair.decide(view(*requests, phase=Phase.PREFILL, max_batch_size=8, num_in_flight=in_flight))


def test_a_long_stream_of_a_tenant_that_does_not_wait_is_no_measure_for_newcomers():
    stream = request(0, 0.0, 20, 3000, tenant="stream")
    steady = [request(number, 0.0, 100, 30, tenant="steady") for number in range(1, 200)]
    new = [request(1000 + number, 5.0, 100, 30, tenant="new") for number in range(100)]
    run("fair", [stream, *steady, *new], max_batch_size=4, until_s=10)
    done = [sum(5.7 < each.end_s <= 10 for each in requests) for requests in (steady, new)]
    assert min(done) >= 4 and max(done) - min(done) <= 2


def test_who_begins_to_wait_stands_at_the_least_of_those_that_wait():
    fair = Fair()
    see(fair, row(1, "stream"), row(2, "steady"))
    fair.on_step_end(StepResult(0, Phase.PREFILL, 1, 1, 0.0, computed=((1, 10),)))
    fair.on_step_end(StepResult(0, Phase.PREFILL, 1, 1, 0.0, computed=((2, 500),)))
    stream = row(1, "stream", Phase.DECODE)
    see(fair, row(2, "steady"), stream)
    see(fair, row(2, "steady"), row(3, "new"), stream)
    assert fair.report() == {"counter_stream": 10, "counter_steady": 500, "counter_new": 500}
    see(fair, row(2, "steady"), row(4, "stream"), stream)  # its own stream saves nothing up for it
    assert fair.report()["counter_stream"] == 500


def test_a_chunk_in_flight_waits_still():
    fair = Fair()
    see(fair, row(1, "a"), row(2, "b"))
    fair.on_step_end(StepResult(0, Phase.PREFILL, 1, 1, 0.0, computed=((2, 500),)))
    see(fair, row(2, "b"), in_flight=1)
    see(fair, row(1, "a"), row(2, "b"))
    assert fair.report()["counter_a"] == 0


def test_where_nobody_waits_who_left_the_queue_last_is_the_measure():
    fair = Fair()
    see(fair, row(1, "a"))
    see(fair, row(1, "a", Phase.DECODE))
    fair.on_step_end(StepResult(0, Phase.DECODE, 1, 1, 0.0, computed=((1, 50),)))
    see(fair, row(2, "b"), row(1, "a", Phase.DECODE))
    assert fair.report()["counter_b"] == 100


def test_counters_of_absent_tenants_are_bounded():
    fair = Fair()
    for number in range(3 * MAX_ABSENT):
        see(fair, row(number, f"tenant-{number}"))
        tokens = 3 * MAX_ABSENT - number
        fair.on_step_end(StepResult(0, Phase.PREFILL, 1, 1, 0.0, computed=((number, tokens),)))
        fair.on_request_end(number)
    assert len(fair._counters) == MAX_ABSENT and f"tenant-{number}" in fair._counters
