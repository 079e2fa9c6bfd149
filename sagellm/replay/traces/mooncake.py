"""Traces as Mooncake publishes them: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.

Source: Qin et al., "Mooncake: Trading More Storage for Less Computation", FAST 2025, and the traces released with it. A hash
id names a block and everything before it; the last block of a prompt may be partly filled and counts as one.
"""

from pathlib import Path
from typing import Any

import numpy as np

from sagellm.core.errors import TraceError
from sagellm.replay.base import MAX_TOKENS, Trace, shortened
from sagellm.replay.traces.json_lines import member, parse_object
from sagellm.replay.traces.lines import BadLines, Broken, TextFile
from sagellm.replay.traces.rows import Rows, block_keys, seconds, size_of_most, whole

MS = 1e-3


def read_mooncake(file: TextFile, bad: BadLines, *, block_size: int | None, unique_parents: bool) -> Trace:
    """Args: `block_size`: None to find the one that the lengths were cut by.

    Raises:
        TraceError: a malformed line, unless `bad` skips it, or nothing is left.
    """
    rows = Rows(bad)
    for number, row in file.parse(_parse, bad):
        rows.add(number, *row)
    if not rows.times:
        raise bad.nothing_left()
    size = _fitting(rows, block_size, Path(file.name).name)
    if unique_parents:
        rows.leave_out_overlaps()
    return rows.trace(file, size)


def _parse(line: bytes) -> tuple[float, int, int, list[int], str]:
    row = parse_object(line)
    tenant: Any = row.get("tenant", "")
    if type(tenant) is not str:
        raise Broken(f"tenant is {shortened(tenant)}; a string was expected.")
    return (
        seconds(member(row, "timestamp"), "timestamp", MS),
        whole(member(row, "input_length"), "input_length"),
        whole(row.get("output_length", 0), "output_length"),
        block_keys(member(row, "hash_ids"), "hash_ids"),
        tenant,
    )


def _fitting(rows: Rows, block_size: int | None, name: str) -> int:
    """The block size, once the requests that it does not fit are handed to `rows.bad`."""
    lengths = np.array(rows.inputs, np.int64)
    counts = np.array([len(keys) for keys in rows.keys], np.int64)
    # A request of L tokens in k blocks fits sizes with (k - 1) * size < L <= k * size.
    lowest = np.where(counts > 0, -(-lengths // np.maximum(counts, 1)), MAX_TOKENS + 1)
    highest = np.where(counts > 1, (lengths - 1) // np.maximum(counts - 1, 1), MAX_TOKENS)
    size = block_size or size_of_most(np.maximum(lowest, 1), highest)
    if size is None:
        raise TraceError(f"{name}: no line says how many tokens a block has; give --block-size.")
    expected = -(-lengths // size)
    wrong = np.flatnonzero(expected != counts).tolist()
    for row in wrong:
        rows.bad.add(
            rows.lines[row],
            f"{counts[row]} hash_ids for input_length {lengths[row]}; with blocks of {size} tokens it takes {expected[row]}.",
        )
    if wrong:
        rows.keep(np.flatnonzero(expected == counts).tolist())
    return size
