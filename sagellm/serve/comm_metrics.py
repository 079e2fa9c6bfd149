"""Collectives as Prometheus sees them.

Counters and histograms, from which Prometheus computes rates over any window; the gauges say the same since the start.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from sagellm.engines.lmdeploy.comm_stats import LATENCY_BOUNDS_S

LABELS = ["rank", "op"]


def comm_families(
    rows: list[dict[str, Any]], step_s: float | None, choice: dict[str, Any] | None = None
) -> Iterator[Metric]:
    """Yield the metrics of collectives.

    Args:
        rows: of `CommStats.report`.
        step_s: wall-clock seconds with a step running, None where the engine does not say.
        choice: of the workers, as `CommChoice.report` has it.
    """
    if choice is not None:
        yield from _of_choice(choice)
    for name, key, text, scale in (
        ("sagellm_comm_seconds", "exposed_ns", "Wall-clock time in which collectives kept the rank from computing.", 1e-9),
        ("sagellm_comm_operations", "count", "Collectives that have ended.", 1),
        ("sagellm_comm_bytes", "bytes", "Sizes of timed collectives, as NCCL's tests count them.", 1),
        ("sagellm_comm_bus_bytes", "bus_bytes", "The same times the operation's factor of bus bandwidth.", 1),
    ):
        counter = CounterMetricFamily(name, text, labels=LABELS)
        for row in rows:
            counter.add_metric(_labels(row), row[key] * scale)
        yield counter
    yield _latencies(rows)
    yield _bandwidths(rows)
    yield _hidden(rows)
    if rows and step_s:
        yield GaugeMetricFamily(
            "sagellm_comm_share", "Share of the steps' time in which the rank that waited longest did, since the start.",
            value=_longest_s(rows) / step_s,
        )  # fmt: skip


def _of_choice(choice: dict[str, Any]) -> Iterator[Metric]:
    backends = GaugeMetricFamily(
        "sagellm_comm_backend", "1 for the backend of each collective, among which it was chosen, and why these.",
        labels=["op", "backend", "candidates", "reason"],
    )  # fmt: skip
    for name, backend in choice["chosen"].items():
        backends.add_metric([name, backend, " ".join(choice["candidates"]), choice["reason"]], 1)
    yield backends
    if choice["topology_s"] is not None:
        yield GaugeMetricFamily(
            "sagellm_comm_topology_seconds", "Time to detect the topology of the host, at the start.", choice["topology_s"]
        )
    measured = GaugeMetricFamily(
        "sagellm_comm_measured_seconds", "Time of a collective of all workers by each backend, at the start.",
        labels=["op", "backend", "bytes"],
    )  # fmt: skip
    for name, ways in choice["measured"].items():
        for backend, times in ways.items():
            for size, seconds in times.items():
                measured.add_metric([name, backend, str(size)], seconds)
    yield measured


def _hidden(rows: list[dict[str, Any]]) -> Metric:
    family = GaugeMetricFamily(
        "sagellm_comm_hidden_share", "Share of the latency of collectives in which the rank computed, since the start.",
        labels=LABELS,
    )  # fmt: skip
    for row in rows:
        if row["latency_ns"]:
            family.add_metric(_labels(row), max(0.0, 1 - row["exposed_ns"] / row["latency_ns"]))
    return family


def _latencies(rows: list[dict[str, Any]]) -> Metric:
    family = HistogramMetricFamily(
        "sagellm_comm_latency_seconds", "From the start of a collective to its end, also for the slowest rank.", labels=LABELS
    )
    for row in rows:
        totals = accumulate(row["latency_counts"])
        buckets = list(zip([*map(str, LATENCY_BOUNDS_S), "+Inf"], totals, strict=True))
        family.add_metric(_labels(row), buckets, row["latency_ns"] * 1e-9)
    return family


def _bandwidths(rows: list[dict[str, Any]]) -> Metric:
    family = GaugeMetricFamily(
        "sagellm_comm_bandwidth_bytes_per_second",
        "Size / latency of collectives since the start; algorithm and bus bandwidth are those of NCCL's tests.",
        labels=[*LABELS, "kind"],
    )
    for row in rows:
        if row["latency_ns"] and row["bytes"]:  # objects that were pickled have no size here
            for kind, key in (("algorithm", "bytes"), ("bus", "bus_bytes")):
                family.add_metric([*_labels(row), kind], row[key] / row["latency_ns"] * 1e9)
    return family


def _longest_s(rows: list[dict[str, Any]]) -> float:
    ranks: defaultdict[int, int] = defaultdict(int)
    for row in rows:
        ranks[row["rank"]] += row["exposed_ns"]
    return max(ranks.values()) * 1e-9


def _labels(row: dict[str, Any]) -> list[str]:
    return [str(row["rank"]), row["op"]]
