"""Memory that requests leave in engines which are killed and started again during the measurement."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import psutil

from benchmarks.processes import metrics_of

__all__ = ["EngineMemory", "Growth", "private_bytes"]

# A prompt that was computed for others, and one that was computed by others.
ANSWERED = tuple(
    f'sagellm_pd_requests_total{{outcome="{outcome}",side="{side}"}}'
    for outcome, side in (("offered", "offers"), ("done", "arrivals"))
)


def private_bytes(process: psutil.Process) -> int:
    """Memory without what is shared: libraries, and KV blocks, whose pages come when they are first used, on both sides."""
    info = process.memory_info()
    return info.rss - info.shared


class Growth(NamedTuple):
    """`num_requests`: those between the first and the last look at each process, together."""

    bytes_per_request: float
    num_requests: float


class EngineMemory:
    """Args:
    warm_up: requests of a process before its memory counts: until then it fills caches.
    """

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._lives: dict[tuple[int, float], list[tuple[float, float]]] = defaultdict(list)

    def look(self, servers: Sequence[psutil.Process]) -> None:
        """At each server and the processes below it. One that starts or ends at the moment is left out."""
        for server in servers:
            try:
                words = server.cmdline()
                page = metrics_of(f"http://127.0.0.1:{words[words.index('--port') + 1]}")
                family = [server, *server.children(recursive=True)]
                num_bytes = sum(private_bytes(each) for each in family)
                if server.is_running():  # and so it was the one that answered
                    self.note((server.pid, server.create_time()), sum(page.get(name, 0.0) for name in ANSWERED), num_bytes)
            except (psutil.Error, OSError, ValueError):
                continue

    def note(self, process: tuple[int, float], num_requests: float, num_bytes: float) -> None:
        """`process`: pid, and when it began."""
        if num_requests >= self._warm_up:
            self._lives[process].append((num_requests, num_bytes))

    def growth(self) -> Growth:
        """The line of least squares through all that was seen; each process has a level of its own."""
        up = across = num_requests = 0.0
        for seen in self._lives.values():
            middle_requests, middle_bytes = (fmean(column) for column in zip(*seen, strict=True))
            across += sum((requests - middle_requests) ** 2 for requests, _ in seen)
            up += sum((requests - middle_requests) * (num_bytes - middle_bytes) for requests, num_bytes in seen)
            num_requests += seen[-1][0] - seen[0][0]
        return Growth(up / across if across else 0.0, num_requests)
