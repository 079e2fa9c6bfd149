"""Metrics of requests against a slow oracle that loops over requests, and the cases in which there is no metric."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.config import Price, Slo
from benchmarks.errors import BenchmarkError
from benchmarks.metrics import compute
from benchmarks.metrics.definitions import DEFINITIONS
from tests.benchmarks.metrics.conftest import Request, make_samples, requests

SLO = Slo(ttft_s=1.0, tpot_s=0.5)
NAN = float("nan")
LATENCIES = ("ttft", "tpot", "itl", "e2e")


def percentile(values: list[float], percent: int) -> float:
    values = sorted(values)
    place = (len(values) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def oracle(round_: list[Request]) -> dict[str, float]:
    values: dict[str, list[float]] = {name: [] for name in LATENCIES}
    whole = num_good = tokens = 0
    for request in round_:
        whole += request.ok
        if not request.ok or not request.chunks:
            continue
        tokens += request.output_tokens
        first, last = request.chunks[0][0], request.chunks[-1][0]
        values["ttft"].append(first - request.sent_s)
        values["e2e"].append(last - request.sent_s)
        tpot = 0.0
        if request.output_tokens > 1:
            tpot = (last - first) / (request.output_tokens - 1)
            values["tpot"].append(tpot)
        num_good += first - request.sent_s <= SLO.ttft_s and tpot <= SLO.tpot_s
        for (before, _), (now, number) in zip(request.chunks, request.chunks[1:], strict=False):
            values["itl"] += [(now - before) / number] * number
    metrics = {f"{name}_p{percent}_s": percentile(of, percent)
               for name, of in values.items() if of for percent in (50, 95, 99)}  # fmt: skip
    metrics["failed_requests"] = len(round_) - whole
    arrivals = [arrival for request in round_ for arrival, _ in request.chunks]
    if whole and arrivals:
        wall = max(arrivals) - min(request.sent_s for request in round_ if not math.isnan(request.sent_s))
        metrics |= {
            "output_tokens_per_s": tokens / wall,
            "requests_per_s": whole / wall,
            "goodput_rps": num_good / wall,
        }
    return metrics


def unstreamed(round_: list[Request]) -> bool:
    many = [request for request in round_ if request.ok and request.output_tokens > 1]
    return bool(many) and all(len(request.chunks) == 1 for request in many)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=8))
def test_equals_the_slow_oracle(round_: list[Request]):
    samples = make_samples(round_)
    if unstreamed(round_):
        with pytest.raises(BenchmarkError, match="without streaming"):
            compute.request_metrics(samples, SLO)
        return
    measured = compute.request_metrics(samples, SLO)
    assert measured.metrics == pytest.approx(oracle(round_), rel=1e-9, abs=1e-9)
    wanted = {name for name in DEFINITIONS if name.split("_p")[0] in LATENCIES}
    wanted |= {"output_tokens_per_s", "requests_per_s", "goodput_rps", "failed_requests"}
    assert measured.metrics.keys() | measured.absent.keys() == wanted
    assert not measured.metrics.keys() & measured.absent.keys()


def test_a_round_by_hand():
    measured = compute.request_metrics(
        make_samples([
            Request(0.0, True, [(0.5, 1), (0.7, 1), (1.3, 3)]),  # TPOT 0.2, gaps 0.2, 0.2, 0.2, 0.2
            Request(1.0, True, [(3.0, 1), (4.0, 1)]),  # too late for the SLO
            Request(2.0, False, [(5.0, 1)]),  # makes the round longer, counts for nothing else
        ]),
        SLO,
    )  # fmt: skip
    metrics = measured.metrics
    assert metrics["ttft_p50_s"] == pytest.approx(1.25)
    assert metrics["tpot_p50_s"] == pytest.approx(0.6)
    assert metrics["itl_p50_s"] == pytest.approx(0.2)
    assert metrics["e2e_p50_s"] == pytest.approx(2.15)
    assert metrics["output_tokens_per_s"] == pytest.approx(7 / 5)
    assert metrics["requests_per_s"] == pytest.approx(2 / 5)
    assert metrics["goodput_rps"] == pytest.approx(1 / 5)
    assert metrics["failed_requests"] == 1


def test_one_token_answers_have_no_tpot():
    measured = compute.request_metrics(make_samples([Request(0.0, True, [(0.5, 1)])]), SLO)
    assert measured.absent["tpot_p50_s"] == "no answer has two or more output tokens"
    assert measured.absent["itl_p99_s"] == "no answer has two or more chunks"
    assert measured.metrics["goodput_rps"] == pytest.approx(2)


def test_nothing_answered():
    measured = compute.request_metrics(make_samples([Request(0.0, False, []), Request(NAN, False, [])]), SLO)
    assert measured.metrics == {"failed_requests": 2}
    assert set(measured.absent.values()) == {"no request was answered whole"}


def test_an_answer_without_a_token_is_not_good():
    measured = compute.request_metrics(make_samples([Request(0.0, True, []), Request(0.0, True, [(0.5, 1)])]), SLO)
    assert measured.metrics["goodput_rps"] == pytest.approx(2)
    assert measured.metrics["requests_per_s"] == pytest.approx(4)


def test_one_streamed_answer_is_enough_to_trust_the_clock():
    round_ = [Request(0.0, True, [(0.5, 4)]), Request(0.0, True, [(0.5, 4), (0.6, 1)])]
    assert compute.request_metrics(make_samples(round_), SLO).metrics["ttft_p50_s"] == 0.5


@given(st.floats(0.1, 1e4), st.integers(1, 10**6), st.integers(1, 64), st.floats(0.01, 100))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_cost(wall: float, tokens: int, devices: int, price: float):
    metrics, absent = compute.cost_metrics(devices, wall, tokens, Price(per_device_hour=price))
    # The other way round: what a million tokens take at the observed speed, and an hour's price for that long.
    seconds = 1e6 / (tokens / wall)
    assert metrics["device_s_per_mtok"] == pytest.approx(seconds * devices)
    assert metrics["cost_per_mtok"] == pytest.approx(seconds * devices * price / 3600)
    assert absent == {}


def test_cost_without_price_or_tokens():
    metrics, absent = compute.cost_metrics(1, 10.0, 5, Price(per_device_hour=0))
    assert metrics == {"device_s_per_mtok": 2e6} and "price" in absent["cost_per_mtok"]
    assert compute.cost_metrics(1, 10.0, 0, Price(per_device_hour=1)).absent.keys() == {
        "device_s_per_mtok",
        "cost_per_mtok",
    }


def test_mfu():
    assert compute.mfu(flops=3e12, wall=2.0, peak_flops=1e12, devices=3) == pytest.approx(0.5)


def test_paired_ratio_is_of_pairs():
    ratio = compute.paired_ratio(np.array([[1.0, 1.0], [4.0, 2.0], [9.0, 0.0]]))
    assert ratio.median == 1.5 and ratio.num_pairs == 2 and math.isnan(ratio.low) and math.isnan(ratio.high)


def test_paired_ratio_interval():
    pairs = np.array([[1.1 + n / 1000, 1.0] for n in range(9)])
    ratio = compute.paired_ratio(pairs, seed=3)
    assert 1.1 <= ratio.low < ratio.median < ratio.high <= 1.108
    assert ratio.median == pytest.approx(1.104)
    assert ratio == compute.paired_ratio(pairs, seed=3)


def test_paired_ratio_to_nothing():
    assert compute.paired_ratio(np.array([[0.0, 0.0]])) is None
    assert compute.paired_ratio(np.empty((0, 2))) is None
