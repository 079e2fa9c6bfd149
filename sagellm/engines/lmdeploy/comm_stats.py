"""Cost of the collectives of one rank, by operation.

Sizes and bandwidths are those of NCCL's tests. The size of an operation is that of what all ranks have together: the tensor to
be reduced or broadcast, the whole of what is gathered, scattered or exchanged. Algorithm bandwidth is size / time. Bus
bandwidth is that times a factor of the operation and the number of ranks, so that it can be held against the speed of a
link whatever the number of ranks is.

Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
"""

import threading
from bisect import bisect_left
from typing import Any

__all__ = ["BOUNDS_NS", "LATENCY_BOUNDS_S", "CommStats", "bus_factor"]

# Upper bounds of the histogram's buckets, inclusive as Prometheus has them; what is longer lies in one more.
LATENCY_BOUNDS_S = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1, 1.0,
)  # fmt: skip
BOUNDS_NS = [round(bound * 1e9) for bound in LATENCY_BOUNDS_S]


def bus_factor(name: str, num_ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth of an operation among so many ranks; 1 of broadcasts, messages and others."""
    if name.startswith("all_reduce"):
        return 2 * (num_ranks - 1) / num_ranks
    if name.startswith(("all_gather", "reduce_scatter", "all_to_all")):
        return (num_ranks - 1) / num_ranks
    return 1.0


class CommStats:
    """Counts by operation and number of ranks. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[int, str], dict[str, Any]] = {}
        self._exchanged: dict[tuple[int, str], dict[str, Any]] = {}  # the same, of native steps

    def add(self, rank: int, name: str, num_bytes: int, num_ranks: int, latency_ns: int | None) -> None:
        """One operation that has ended. `latency_ns`: from its start to its end; None if the end is unknown."""
        with self._lock:
            row = self._row(rank, name)
            row["count"] += 1
            if latency_ns is not None:
                # Bytes of what was not timed would make a bandwidth too high.
                row["bytes"] += num_bytes
                row["bus_bytes"] += num_bytes * bus_factor(name, num_ranks)
                row["latency_ns"] += latency_ns
                row["latency_counts"][bisect_left(BOUNDS_NS, latency_ns)] += 1

    def expose(self, rank: int, name: str, waited_ns: int) -> None:
        """Wall-clock time in which the caller could do nothing else."""
        with self._lock:
            self._row(rank, name)["exposed_ns"] += waited_ns

    def set_exchanged(self, rank: int, name: str, num_ranks: int, costs: dict[str, Any]) -> bool:
        """Take what native steps have exchanged so far, as `_core.ShmExchange` counts it. True if there is something new."""
        row = {
            "count": costs["count"], "bytes": costs["bytes"], "bus_bytes": costs["bytes"] * bus_factor(name, num_ranks),
            "exposed_ns": costs["exposed_ns"], "latency_ns": costs["ns"], "latency_counts": costs["latency_counts"],
        }  # fmt: skip
        with self._lock:
            former = self._exchanged.get((rank, name))
            if costs["count"] == (0 if former is None else former["count"]):
                return False
            self._row(rank, name)
            self._exchanged[rank, name] = row
        return True

    def report(self) -> list[dict[str, Any]]:
        """A row an operation and rank, fit for JSON; `latency_counts` has one for each bound and one for what is longer."""
        with self._lock:
            return [
                {"rank": rank, "op": name} | _joined(row, self._exchanged.get((rank, name)))
                for (rank, name), row in self._rows.items()
            ]

    def _row(self, rank: int, name: str) -> dict[str, Any]:
        found = self._rows.get((rank, name))
        if found is None:
            found = self._rows[rank, name] = {
                "count": 0, "bytes": 0, "bus_bytes": 0.0, "exposed_ns": 0, "latency_ns": 0,
                "latency_counts": [0] * (len(BOUNDS_NS) + 1),
            }  # fmt: skip
        return found


def _joined(row: dict[str, Any], other: dict[str, Any] | None) -> dict[str, Any]:
    if other is None:
        return row | {"latency_counts": row["latency_counts"].copy()}
    counts = [one + two for one, two in zip(row["latency_counts"], other["latency_counts"], strict=True)]
    return {name: row[name] + other[name] for name in row if name != "latency_counts"} | {"latency_counts": counts}
