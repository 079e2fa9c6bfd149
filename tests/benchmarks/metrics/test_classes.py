"""A mixed load, class by class: each class as if its requests had been the whole round, but for the time of the round."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.config import Constant, LoadClass, Slo
from benchmarks.errors import BenchmarkError
from benchmarks.metrics.classes import class_metrics, definitions_with
from benchmarks.metrics.compute import request_metrics, wall_s
from benchmarks.metrics.definitions import DEFINITIONS
from tests.benchmarks.metrics.conftest import Request, make_samples, requests

SLO = Slo(ttft_s=10.0, tpot_s=1.0)


def load_class(name, **service):
    return LoadClass(name=name, prompt_tokens=Constant(value=1), output_tokens=Constant(value=1), service=service)


CLASSES = (load_class("chat", ttft_slo_ms=1000), load_class("document"), load_class("urgent", ttft_slo_ms=500, tpot_slo_ms=200))
ROUND = [
    Request(0.0, True, [(0.5, 1), (0.7, 1)]),  # a chat in time
    Request(0.0, True, [(5.0, 1), (5.5, 1)]),  # a chat that is late, though not for a document
    Request(0.0, True, [(5.0, 1), (5.5, 1)]),  # a document in time
    Request(1.0, True, [(2.0, 1), (8.0, 1)]),  # a document that drags
    Request(2.0, True, [(2.4, 1), (2.5, 1)]),  # urgent
    Request(2.0, True, [(2.4, 1), (2.7, 1)]),  # urgent, a token too slow
    Request(2.0, False, [(10.0, 1)]),  # urgent, broken, and the end of the round
]
NUMBERS = np.array([0, 0, 1, 1, 2, 2, 2])


def test_each_class_is_judged_by_what_it_asks_for():
    metrics = class_metrics(make_samples(ROUND), NUMBERS, CLASSES, SLO).metrics
    for name, good in (("chat", 1), ("document", 1), ("urgent", 1)):
        assert metrics[f"{name}.goodput_rps"] == pytest.approx(good / 10)
    assert metrics["goodput_rps"] == pytest.approx(3 / 10)
    assert metrics["urgent.failed_requests"] == 1 and metrics["chat.failed_requests"] == 0
    assert metrics["chat.requests_per_s"] == metrics["urgent.requests_per_s"] == pytest.approx(2 / 10)
    assert metrics["chat.ttft_p50_s"] == pytest.approx(2.75) and metrics["document.ttft_p50_s"] == pytest.approx(3.0)
    assert metrics["urgent.itl_p50_s"] == pytest.approx(0.2)


def test_a_class_that_nobody_answered_has_no_goodput_rather_than_no_figure():
    broken = [ROUND[0], Request(0.0, False, [(10.0, 1)])]
    found = class_metrics(make_samples(broken), np.array([0, 1]), CLASSES[:2], SLO)
    assert found.metrics["document.goodput_rps"] == found.metrics["document.requests_per_s"] == 0
    assert found.absent["document.ttft_p50_s"] == "no request was answered whole"
    assert found.metrics["goodput_rps"] == pytest.approx(1 / 10)


def test_without_classes_the_round_is_judged_as_ever():
    assert class_metrics(make_samples(ROUND), np.zeros(len(ROUND), int), (), SLO) == ({}, {})


def test_a_class_that_was_not_streamed_is_named():
    whole = [ROUND[0], Request(0.0, True, [(5.0, 3)])]
    with pytest.raises(BenchmarkError, match="class document: all 1 answers of several tokens came in one chunk"):
        class_metrics(make_samples(whole), np.array([0, 1]), CLASSES, SLO)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.tuples(requests(), st.integers(0, 2)), min_size=1, max_size=9))
def test_a_class_is_the_round_of_its_requests(rows):
    """Held against samples that were made of the class's requests alone."""
    samples = make_samples([request for request, _ in rows])
    numbers = np.array([number for _, number in rows])
    try:
        found = class_metrics(samples, numbers, CLASSES, SLO)
    except BenchmarkError:
        return
    for number, each in enumerate(CLASSES):
        alone = make_samples([request for request, of in rows if of == number])
        expected = request_metrics(alone, each.slo(SLO), wall_s(samples))
        prefix = f"{each.name}."
        metrics = {name: value for name, value in found.metrics.items() if name.startswith(prefix)}
        assert metrics == pytest.approx({prefix + name: value for name, value in expected.metrics.items()})
    if "goodput_rps" in found.metrics:
        parts = [found.metrics[f"{each.name}.goodput_rps"] for each in CLASSES]
        assert found.metrics["goodput_rps"] == pytest.approx(sum(parts))
    assert found.metrics.keys() | found.absent.keys() <= definitions_with(CLASSES).keys()


def test_definitions():
    assert definitions_with(()) == DEFINITIONS
    known = definitions_with(CLASSES)
    assert known["chat.ttft_p95_s"].unit == "s" and known["chat.goodput_rps"].better == "higher"
    assert "chat.mfu" not in known and "chat.peak_memory_bytes" not in known
