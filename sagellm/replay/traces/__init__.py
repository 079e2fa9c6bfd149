"""Readers of trace files. `read_trace` finds out which kind it is given."""

import json
from pathlib import Path

from sagellm.core.errors import TraceError
from sagellm.replay.base import Trace
from sagellm.replay.traces.event_log import read_event_log
from sagellm.replay.traces.lengths import read_lengths
from sagellm.replay.traces.lines import BadLines, open_text
from sagellm.replay.traces.mooncake import read_mooncake

__all__ = ["read_trace"]

PROBED_LINES = 20


def read_trace(
    path: Path, *, block_size: int | None = None, skip_bad: bool = False, unique_parents: bool = True
) -> Trace:  # fmt: skip
    """A trace from a file, plain or gzip: Mooncake's JSON lines, the engine's event log, or a CSV of lengths.

    Args:
        block_size: tokens of a block; None to take it from the trace.
        skip_bad: pass over malformed lines and count them.
        unique_parents: a block that continues two different prefixes is malformed too, as it is with prefix semantics.

    Raises:
        TraceError: unreadable, empty, of no known kind, or a malformed line; the message names file and line.
    """
    file = open_text(path)
    bad = BadLines(file.name, skip=skip_bad)
    if file.cut:
        bad.add(len(file.lines) + 1, file.cut)
    first = [line.lstrip() for _, line in zip(range(PROBED_LINES), (line for _, line in file.numbered()), strict=False)]
    if not any(line.startswith((b"{", b"[")) for line in first):
        if b"," not in first[0]:
            raise TraceError(
                f"{path}, line 1: neither JSON nor CSV. Known are Mooncake's JSON lines (timestamp, input_length, "
                "output_length, hash_ids), the engine's event log, and CSV with a header."
            )
        return read_lengths(file, bad, block_size=block_size)
    if any(_is_event(line) for line in first):
        return read_event_log(file, bad, block_size=block_size, unique_parents=unique_parents)
    return read_mooncake(file, bad, block_size=block_size, unique_parents=unique_parents)


def _is_event(line: bytes) -> bool:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and "event" in row and "hash_ids" not in row
