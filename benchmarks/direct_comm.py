"""Collectives timed at the process group itself, as a check on what the hooks report.

Knows nothing of the patches: the methods of torch's `ProcessGroup` and `Work` are replaced in each worker, so what does not
pass through the engine's watched name space is seen too.
"""

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

from torch import distributed

from sagellm.core.hooks import Plugin

# Methods of torch's ProcessGroup that start an operation and return a handle.
STARTS = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "alltoall",
    "alltoall_base", "barrier", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "scatter", "send",
)  # fmt: skip


class DirectTimer(Plugin):
    """Has no hooks; being constructed in a worker is what it needs. Leaves `direct-PID.json` in `folder` when it is closed."""

    def __init__(self, folder: str) -> None:
        self._file = Path(folder) / f"direct-{os.getpid()}.json"
        self._spans: list[tuple[int, int]] = []
        for name in STARTS:
            if hasattr(distributed.ProcessGroup, name):
                self._watch(distributed.ProcessGroup, name)
        self._watch(distributed.Work, "wait")

    def _watch(self, kind: Any, name: str) -> None:
        original, spans = getattr(kind, name), self._spans

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic_ns()
            try:
                return original(*args, **kwargs)
            finally:
                spans.append((begin, time.monotonic_ns()))

        setattr(kind, name, timed)

    def close(self) -> None:
        self._file.write_text(json.dumps(self._spans))


def exposed_s(folder: Path, begin_ns: int, end_ns: int) -> dict[str, float]:
    """By process, seconds between two moments of `time.monotonic_ns` in which its thread was inside a collective or a wait."""
    found = {}
    for file in sorted(folder.glob("direct-*.json")):
        spans = json.loads(file.read_text())
        inside = sum(max(min(end, end_ns) - max(begin, begin_ns), 0) for begin, end in spans)
        if spans:
            found[file.stem] = inside / 1e9
    return found


