"""Collectives operation by operation, from the differences of the server's counters around a round."""

import re
from collections.abc import Iterable, Mapping

from benchmarks.result import Definition

SECONDS, STEPS = "sagellm_comm_seconds_total", "sagellm_step_seconds_total"
_PARTS = {
    SECONDS: "exposed", "sagellm_comm_operations_total": "count", "sagellm_comm_bytes_total": "bytes",
    "sagellm_comm_bus_bytes_total": "bus_bytes", "sagellm_comm_latency_seconds_sum": "latency",
    "sagellm_comm_latency_seconds_count": "timed",
}  # fmt: skip
_SERIES = re.compile(r'(\w+)\{op="([^"]*)",rank="([^"]*)"\}$')
_TEXT = (
    "The collectives are those whose name is in the middle, on the rank that waited longest for all collectives. Sizes and "
    "bandwidths are those of NCCL's tests; a latency runs from the start of a collective to its end and so contains the wait "
    "for slower ranks."
)
_KINDS = {
    "share": ("ratio", "lower", "Exposed wall-clock seconds / seconds of engine steps: its part of `comm_share`."),
    "operations": ("operations", None, "Number of collectives that have ended."),
    "latency_s": ("s", "lower", "Mean latency."),
    "algorithm_bytes_per_s": ("B/s", "higher", "Sum of sizes / sum of latencies."),
    "bus_bytes_per_s": (
        "B/s", "higher",
        "Algorithm bytes per second times the operation's factor: 2 (n - 1) / n for `all_reduce` over n ranks.",
    ),
}


def by_rank(deltas: Mapping[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    """rank -> operation -> what of it -> difference."""
    ranks: dict[str, dict[str, dict[str, float]]] = {}
    for name, delta in deltas.items():
        if (match := _SERIES.match(name)) and match[1] in _PARTS:
            ranks.setdefault(match[3], {}).setdefault(match[2], {})[_PARTS[match[1]]] = delta
    return ranks


def longest(ranks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> tuple[str, float]:
    """(rank, seconds) of the one that waited longest."""
    waited = {rank: sum(of.get("exposed", 0.0) for of in operations.values()) for rank, operations in ranks.items()}
    rank = max(waited, key=waited.__getitem__)
    return rank, waited[rank]


def operation_metrics(operations: Mapping[str, Mapping[str, float]], step_s: float) -> dict[str, float]:
    """`comm.OPERATION.KIND` for those that took part in the round; older servers tell the share only."""
    metrics: dict[str, float] = {}
    for name, of in sorted(operations.items()):
        found = {"share": of.get("exposed", 0.0) / step_s}
        if of.get("count"):
            found["operations"] = of["count"]
        if of.get("latency") and of.get("timed"):
            found["latency_s"] = of["latency"] / of["timed"]
            if of.get("bytes"):
                found["algorithm_bytes_per_s"] = of["bytes"] / of["latency"]
                found["bus_bytes_per_s"] = of["bus_bytes"] / of["latency"]
        if found["share"] or len(found) > 1:
            metrics |= {f"comm.{name}.{kind}": value for kind, value in found.items()}
    return metrics


def operation_definitions(names: Iterable[str]) -> dict[str, Definition]:
    """Return the definitions of the names that are metrics of operations."""
    definitions = {}
    for name in names:
        if name.startswith("comm.") and (kind := name.rpartition(".")[2]) in _KINDS:
            unit, better, text = _KINDS[kind]
            definitions[name] = Definition(unit=unit, better=better, text=f"{text} {_TEXT}")
    return definitions
