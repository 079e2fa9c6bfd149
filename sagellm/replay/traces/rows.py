"""Gathers the requests of a reader, checks what holds between them, and makes the trace."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from sagellm.core.errors import TraceError
from sagellm.replay.base import MAX_KEY, MAX_TOKENS, MAX_TRACE_BLOCKS, Trace, overlap, shortened
from sagellm.replay.traces.lines import BadLines, Broken, TextFile


class Rows:
    """Requests in file order; one whose time falls is malformed."""

    def __init__(self, bad: BadLines) -> None:
        self.bad = bad
        self.times: list[float] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.keys: list[Sequence[int]] = []
        self.tenants: list[str] = []
        self.lines: list[int] = []
        self._last_s = -math.inf
        self._num_blocks = 0

    def check_size(self, line: int, num_blocks: int) -> None:
        """Raises TraceError if a trace may not have so many blocks more. Asked before they are made."""
        if self._num_blocks + num_blocks > MAX_TRACE_BLOCKS:
            raise TraceError(
                f"{self.bad.file}, line {line}: with its {num_blocks} blocks the trace has more than {MAX_TRACE_BLOCKS}; split "
                "the trace, or raise --block-size."
            )

    def add(
        self, line: int, time_s: float, num_input: int, num_output: int, keys: Sequence[int], tenant: str = ""
    ) -> None:  # fmt: skip
        if time_s < self._last_s:
            self.bad.add(line, f"the timestamp falls ({time_s:g} s after {self._last_s:g} s); sort the trace by time.")
            return
        self.check_size(line, len(keys))
        self._num_blocks += len(keys)
        self._last_s = time_s
        self.times.append(time_s)
        self.inputs.append(num_input)
        self.outputs.append(num_output)
        self.keys.append(keys)
        self.tenants.append(tenant)
        self.lines.append(line)

    def keep(self, rows: Sequence[int]) -> None:
        """Only these, by index."""
        for name in ("times", "inputs", "outputs", "keys", "tenants", "lines"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])

    def leave_out_overlaps(self) -> None:
        """Hand every request to `bad` that puts a block under another parent than a request before it does."""
        if overlap(self._flat(), self._offsets()) is None:
            return
        parent_of: dict[int, tuple[int | None, int]] = {}
        kept = []
        for row, keys in enumerate(self.keys):
            new: dict[int, tuple[int | None, int]] = {}
            for parent, key in zip([None, *keys], keys, strict=False):
                known = parent_of.get(key)
                if key in new:
                    self.bad.add(self.lines[row], f"block {key} is there twice in one request.")
                    break
                if known is not None and known[0] != parent:
                    self.bad.add(
                        self.lines[row],
                        f"overlapping ids: block {key} continues another prefix than in line {known[1]}; with prefix "
                        "semantics an id stands for all tokens up to its block (--semantics object takes such a trace).",
                    )
                    break
                new[key] = (parent, self.lines[row])
            else:
                for key, origin in new.items():
                    parent_of.setdefault(key, origin)
                kept.append(row)
        self.keep(kept)

    def trace(self, file: TextFile, block_size: int) -> Trace:
        if not self.times:
            raise self.bad.nothing_left()
        return Trace(
            name=file.name, block_size=block_size, times_s=np.array(self.times, np.float64),
            input_tokens=np.array(self.inputs, np.int32), output_tokens=np.array(self.outputs, np.int32),
            keys=self._flat(), offsets=self._offsets(), tenants=tuple(self.tenants) if any(self.tenants) else (),
            lines=np.array(self.lines, np.int64), sha256=file.sha256, num_skipped=self.bad.count,
        )  # fmt: skip

    def _flat(self) -> np.ndarray:
        return np.fromiter(chain.from_iterable(self.keys), np.uint64)

    def _offsets(self) -> np.ndarray:
        return np.concatenate(([0], np.cumsum([len(keys) for keys in self.keys], dtype=np.int64))).astype(np.int64)


def whole(value: Any, name: str, highest: int = MAX_TOKENS) -> int:
    """The value as a count. Raises Broken."""
    if type(value) is not int:
        raise Broken(f"{name} is {shortened(value)}; an integer was expected.")
    if not 0 <= value <= highest:
        raise Broken(f"{name} is {shortened(value)}; it must be 0 to {highest}.")
    return value


def seconds(value: Any, name: str, unit_s: float) -> float:
    """A time in `unit_s` as seconds. Raises Broken."""
    if type(value) not in (int, float):
        raise Broken(f"{name} is {shortened(value)}; a number was expected.")
    try:
        time_s = value * unit_s
    except OverflowError:
        time_s = math.inf
    if not 0 <= time_s < math.inf:
        raise Broken(f"{name} is {shortened(value)}; a finite number, 0 or more, was expected.")
    return time_s


def block_keys(values: Any, name: str) -> list[int]:
    """The list, if all of it are 64-bit keys. Raises Broken."""
    if type(values) is not list:
        raise Broken(f"{name} is {shortened(values)}; a list of integers was expected.")
    if not set(map(type, values)) <= {int} or (values and not (min(values) >= 0 and max(values) <= MAX_KEY)):
        for value in values:
            whole(value, f"an entry of {name}", MAX_KEY)
    return values


def size_of_most(lowest: np.ndarray, highest: np.ndarray) -> int | None:
    """The block size that most requests allow: each allows `lowest[i]` to `highest[i]` (int64 [r]). None: no request says.

    Among equally good ones it is the smallest power of two, since sizes are powers of two in practice, else the smallest.
    """
    fits = lowest <= highest
    starts, ends = lowest[fits], highest[fits]
    if not len(starts):
        return None
    points = np.concatenate([starts, ends + 1])
    steps = np.concatenate([np.ones(len(starts), np.int64), -np.ones(len(ends), np.int64)])
    places, inverse = np.unique(points, return_inverse=True)
    votes = np.cumsum(np.bincount(inverse, weights=steps, minlength=len(places)))
    best = int(np.argmax(votes))
    low, high = int(places[best]), int(places[best + 1]) - 1
    power = 1 << (low - 1).bit_length()
    return power if power <= high else low
