"""When requests are sent, and the recorded traces that tell it."""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.config import Arrivals, Closed, Poisson, Trace
from benchmarks.errors import BenchmarkError

TRACE_BLOCK = 512  # tokens that one of a trace's hash_ids stands for


@dataclass(frozen=True)
class TraceRow:
    """One recorded request, not yet scaled. `hash_ids[i]` names tokens 512 i to 512 (i + 1) and all before them."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def send_times(arrivals: Arrivals, num_requests: int, seed: int) -> np.ndarray | None:
    """float64 [num_requests], seconds since the start, ascending from 0; None where answers set the pace (closed).

    Raises:
        BenchmarkError: a trace that cannot be read or is too short.
    """
    if isinstance(arrivals, Closed):
        return None
    if isinstance(arrivals, Poisson):
        gaps = np.random.default_rng([seed, 0]).exponential(1 / arrivals.rate, num_requests)
        return np.cumsum(gaps) - gaps[0]
    stamps = np.array([row.timestamp_ms for row in read_trace(arrivals, num_requests)])
    return (stamps - stamps[0]) / 1000 / arrivals.speed


def read_trace(arrivals: Trace, num_requests: int) -> list[TraceRow]:
    """The first `num_requests` rows; blank lines do not count, keys beyond the four are left alone.

    Raises:
        BenchmarkError: names the file and the line.
    """
    rows: list[TraceRow] = []
    try:
        with arrivals.file.open() as lines:
            numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            for number, line in islice(numbered, num_requests):
                row = _read_row(line, f"{arrivals.file}, line {number}")
                if rows and row.timestamp_ms < rows[-1].timestamp_ms:
                    raise BenchmarkError(
                        f"{arrivals.file}, line {number}: timestamp {row.timestamp_ms:g} comes after "
                        f"{rows[-1].timestamp_ms:g}; rows must be in the order of their timestamps"
                    )
                rows.append(row)
    except OSError as error:
        raise BenchmarkError(f"cannot read trace {arrivals.file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BenchmarkError(f"trace {arrivals.file} is no UTF-8 text; it must hold JSON lines") from None
    if len(rows) < num_requests:
        raise _too_short(arrivals.file, len(rows), num_requests)
    return rows


def _too_short(file: Path, num_rows: int, num_requests: int) -> BenchmarkError:
    return BenchmarkError(f"trace {file} has {num_rows} requests; num_requests {num_requests} must not be above that")


def _read_row(line: str, where: str) -> TraceRow:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise BenchmarkError(f"{where}: no JSON: {error}") from None
    if not isinstance(values, dict):
        raise BenchmarkError(f"{where}: got {_short(values)}; a row must be an object")
    row = TraceRow(
        timestamp_ms=_field(values, where, "timestamp", _is_time, "a number of milliseconds from 0"),
        input_length=_field(values, where, "input_length", _is_length, "a whole number of tokens from 1"),
        output_length=_field(values, where, "output_length", _is_length, "a whole number of tokens from 1"),
        hash_ids=tuple(_field(values, where, "hash_ids", _is_ids, "a list of whole numbers from 0")),
    )
    num_blocks = -(-row.input_length // TRACE_BLOCK)
    if len(row.hash_ids) != num_blocks:
        raise BenchmarkError(
            f"{where}: hash_ids has {len(row.hash_ids)} ids; input_length {row.input_length} needs {num_blocks}, "
            f"one for each {TRACE_BLOCK} tokens"
        )
    return row


def _field(values: dict[str, Any], where: str, name: str, allowed: Any, text: str) -> Any:
    if name not in values:
        raise BenchmarkError(f"{where}: {name} is missing; it must be {text}")
    if not allowed(values[name]):
        raise BenchmarkError(f"{where}: {name} is {_short(values[name])}; it must be {text}")
    return values[name]


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
