"""Metrics from Prometheus counters: reading the page, differences, what is missing."""

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.errors import BenchmarkError
from benchmarks.metrics.comm import operation_definitions
from benchmarks.metrics.compute import counter_metrics, parse_prometheus, series
from benchmarks.metrics.guesses import place_definitions

KINDS = [(unit, kind, admission) for unit in ("tokens", "blocks") for kind in ("query", "hit")
         for admission in ("first", "retry")]  # fmt: skip


def page(counts: dict[tuple[str, str, str], int], preemptions: int = 0) -> str:
    registry = CollectorRegistry()
    for unit in ("tokens", "blocks"):
        counter = Counter(f"sagellm_prefix_{unit}", "Prefix.", ["kind", "admission"], registry=registry)
        for (of, kind, admission), value in counts.items():
            if of == unit:
                counter.labels(kind=kind, admission=admission).inc(value)
    Counter("sagellm_preemptions", "Preemptions.", registry=registry).inc(preemptions)
    Gauge("sagellm_running", "Requests.", registry=registry).set(-preemptions)
    return generate_latest(registry).decode()


def waited(rank: str, op: str) -> str:
    return series("sagellm_comm_seconds_total", rank=rank, op=op)


def test_series_names_sort_and_escape():
    assert series("a_total") == "a_total"
    assert series("a_total", z="1", b='x"\\') == 'a_total{b="x\\"\\\\",z="1"}'


def test_parse():
    parsed = parse_prometheus(page({("tokens", "hit", "first"): 3}, preemptions=2))
    assert parsed['sagellm_prefix_tokens_total{admission="first",kind="hit"}'] == 3
    assert parsed["sagellm_preemptions_total"] == 2
    assert parsed["sagellm_running"] == -2


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.dictionaries(st.tuples(st.text(), st.text()), st.floats(), max_size=4))
def test_parse_as_prometheus_client_does(values):
    registry = CollectorRegistry()
    gauge = Gauge("sagellm_running", "Requests.", ["model", "place"], registry=registry)
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
    text = generate_latest(registry).decode("utf-8", "surrogatepass")
    theirs = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    expected = {series(each.name, **each.labels): each.value for each in theirs}
    found = parse_prometheus(text)
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=0, nan_ok=True)


def test_a_ctrl_c_is_not_lost():
    text, lost = "\n".join(f'sagellm_running{{model="{number}"}} {number}.5' for number in range(2000)), 0
    before = signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    try:
        for number in range(100):
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0002 + number * 1e-5)
                parse_prometheus(text)
                lost += signal.setitimer(signal.ITIMER_VIRTUAL, 0)[0] == 0
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert lost == 0


@pytest.mark.parametrize("text", ["<html>not found</html>", "a 1_0", 'a{b="c} 1', "a{b=1} 2", "a", "a x", "1a 2"])
def test_no_prometheus_page(text):
    with pytest.raises(BenchmarkError, match="cannot be read"):
        parse_prometheus(text)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=8, max_size=8), st.integers(0, 9))
def test_differences(values: list[tuple[int, int]], preempted: int):
    before = {name: first for name, (first, _) in zip(KINDS, values, strict=True)}
    after = {name: first + more for name, (first, more) in zip(KINDS, values, strict=True)}
    metrics, absent = counter_metrics(parse_prometheus(page(before, 5)), parse_prometheus(page(after, 5 + preempted)))
    more = {name: more for name, (_, more) in zip(KINDS, values, strict=True)}
    for metric, unit, admission in [("tokens", "tokens", "first"), ("blocks", "blocks", "first"),
                                    ("retries", "tokens", "retry")]:  # fmt: skip
        asked, found = more[unit, "query", admission], more[unit, "hit", admission]
        if asked:
            assert metrics[f"kv_hit_rate_{metric}"] == pytest.approx(found / asked)
        else:
            assert f"kv_hit_rate_{metric}" in absent
    assert metrics["preemptions"] == preempted
    assert metrics["comm_share"] == 0


def test_a_series_that_appears_began_at_zero():
    after = parse_prometheus(page({("tokens", "query", "first"): 8, ("tokens", "hit", "first"): 2}))
    metrics, absent = counter_metrics({}, after)
    assert metrics["kv_hit_rate_tokens"] == 0.25
    assert "sagellm_prefix_blocks_total" in absent["kv_hit_rate_blocks"]


def test_a_restarted_server_is_found_out():
    with pytest.raises(BenchmarkError, match="fell from 3 to 1: the server was restarted"):
        counter_metrics({"sagellm_preemptions_total": 3.0}, {"sagellm_preemptions_total": 1.0})


def test_communication_share_is_of_the_slowest_rank():
    before = {waited("0", "all_reduce"): 1.0, "sagellm_step_seconds_total": 10.0}
    after = {
        waited("0", "all_reduce"): 3.5,
        waited("1", "all_reduce"): 2.0,
        waited("1", "all_gather"): 1.0,
        "sagellm_step_seconds_total": 16.0,
    }
    assert counter_metrics(before, after, tensor_parallel=2).metrics["comm_share"] == 0.5


@pytest.mark.parametrize("after", [{}, {"sagellm_step_seconds_total": 1.0}])
def test_communication_that_nobody_counts_is_absent_and_not_zero(after: dict[str, float]):
    measured = counter_metrics({}, after, tensor_parallel=2)
    assert "comm_share" in measured.absent and "comm_share" not in measured.metrics


def test_no_step_no_share():
    counters = {waited("0", "all_reduce"): 1.0, "sagellm_step_seconds_total": 1.0}
    assert counter_metrics(counters, counters, tensor_parallel=2).absent["comm_share"] == "no engine step was made"


def guessed(drafted: float, accepted: float, steps: float) -> dict[str, float]:
    counted = {"drafted": drafted, "accepted": accepted}
    found = {series("sagellm_speculative_tokens_total", kind=kind): value for kind, value in counted.items()}
    return found | {
        series("sagellm_speculative_sequence_steps_total", kind="all"): steps,
        series("sagellm_speculative_sequence_steps_total", kind="guessed"): steps / 2,
    }


def without_guesses(drafted: float, accepted: float, steps: float, more: float) -> dict[str, float]:
    """Return the counters of `guessed` with `more` further steps without guesses."""
    return guessed(drafted, accepted, steps) | {series("sagellm_speculative_sequence_steps_total", kind="all"): steps + more}


def at_places(drafted: tuple[int, ...], accepted: tuple[int, ...]) -> dict[str, float]:
    return {
        series("sagellm_speculative_place_tokens_total", kind=kind, place=str(place)): value
        for kind, counts in (("drafted", drafted), ("accepted", accepted))
        for place, value in enumerate(counts, 1)
    }


def test_guesses():
    before = guessed(10, 4, 20) | at_places((6, 4), (3, 1))
    after = guessed(90, 64, 60) | at_places((46, 24, 10, 0), (43, 16, 5, 0))  # places appear when they are first guessed at
    metrics, absent = counter_metrics(before, after)
    assert metrics["spec_acceptance"] == 60 / 80 and metrics["spec_tokens_per_step"] == 1 + 60 / 40
    assert metrics["spec_mean_accepted"] == 60 / 20 and not [name for name in absent if name.startswith("spec_")]
    by_place = {name: value for name, value in metrics.items() if name.startswith("spec_acceptance_at.")}
    assert by_place == {f"spec_acceptance_at.{place}": at for place, at in ((1, 40 / 40), (2, 15 / 20), (3, 5 / 10))}
    definitions = place_definitions(metrics)
    assert definitions.keys() == by_place.keys() and {each.unit for each in definitions.values()} == {"ratio"}


@pytest.mark.parametrize(
    ("before", "after", "tokens_per_step", "reasons"),
    [
        ({}, {}, None, ["no speculative strategy guesses"] * 3),
        (guessed(3, 2, 4), without_guesses(3, 2, 4, 4), 1.0, ["no guess was made"] * 2),
        (guessed(3, 2, 5), guessed(3, 2, 5), None, ["no guess was made", "no guess was made", "no decode step was made"]),
    ],
)
def test_guesses_that_nobody_made_are_absent(before: dict, after: dict, tokens_per_step: float | None, reasons: list[str]):
    metrics, absent = counter_metrics(before, after)
    assert metrics.get("spec_tokens_per_step") == tokens_per_step and "spec_acceptance" not in metrics
    found = [why for name, why in absent.items() if name.startswith("spec_")]
    assert len(found) == len(reasons) and all(want in why for want, why in zip(reasons, found, strict=True)), found


def collectives(rank: str, op: str, exposed: float, count: float, size: float, latency: float) -> dict[str, float]:
    names = {
        "sagellm_comm_seconds_total": exposed, "sagellm_comm_operations_total": count, "sagellm_comm_bytes_total": size,
        "sagellm_comm_bus_bytes_total": size * 2, "sagellm_comm_latency_seconds_sum": latency,
        "sagellm_comm_latency_seconds_count": count,
    }  # fmt: skip
    return {series(name, rank=rank, op=op): value for name, value in names.items()}


def test_operations_of_the_rank_that_waited_longest():
    before = collectives("0", "all_reduce", 1, 10, 1000, 2) | {"sagellm_step_seconds_total": 5.0}
    after = (
        collectives("0", "all_reduce", 3, 30, 9000, 4) | collectives("0", "broadcast", 1, 4, 0, 0.5)
        | collectives("1", "all_reduce", 1, 30, 9000, 9) | {"sagellm_step_seconds_total": 15.0}
    )  # fmt: skip
    metrics = counter_metrics(before, after, tensor_parallel=2).metrics
    found = {name: value for name, value in metrics.items() if name.startswith("comm.")}
    assert metrics["comm_share"] == pytest.approx(0.3)
    assert found == pytest.approx({
        "comm.all_reduce.share": 0.2, "comm.all_reduce.operations": 20, "comm.all_reduce.latency_s": 0.1,
        "comm.all_reduce.algorithm_bytes_per_s": 4000, "comm.all_reduce.bus_bytes_per_s": 8000,
        "comm.broadcast.share": 0.1, "comm.broadcast.operations": 4, "comm.broadcast.latency_s": 0.125,
    })  # fmt: skip
    definitions = operation_definitions([*metrics, "comm.all_reduce.colour"])
    assert definitions.keys() == found.keys() and definitions["comm.broadcast.latency_s"].unit == "s"
