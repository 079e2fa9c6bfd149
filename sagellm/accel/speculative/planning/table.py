"""Measured step times as a file, and what lies between them."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sagellm.core import cached_folder
from sagellm.core.errors import SpeculationError

__all__ = ["LatencyTable", "read_table", "write_whole"]

FORMAT, VERSION = "sagellm speculative table", 1
AGAIN = "measure it anew: sagellm speculative profile --out FILE"


class LatencyTable(NamedTuple):
    """Seconds of a decode step.

    Attributes:
        batches: sequences in a step, ascending.
        lookaheads: guesses of each of them, ascending.
        seconds: by batch, by lookahead: the median step.
        num_samples: by batch, by lookahead: the number of steps of each median.
        context: tokens before each sequence's guesses, in the mean.
        facts: machine, versions, model, dtype, threads, commit.
    """

    batches: tuple[int, ...]
    lookaheads: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    num_samples: tuple[tuple[int, ...], ...]
    context: float
    facts: dict[str, Any]

    def step_s(self, num_sequences: float, lookahead: Any) -> Any:
        """Bilinear between what was measured; beyond, the last two values go on in a line, and never fall to nothing.

        `lookahead`: a number or an array of them, also of fractions: guesses of all sequences by sequences. The answer is
        alike.
        """
        table = np.array(self.seconds)
        row = _along(np.array(self.batches, float), table, np.array([float(num_sequences)]))[0]
        found = _along(np.array(self.lookaheads, float), row, np.atleast_1d(np.asarray(lookahead, float)))
        found = np.maximum(found, table.min() / 2)
        return found if np.ndim(lookahead) else float(found[0])

    def is_measured(self, num_sequences: float, lookahead: float) -> bool:
        """Whether it lies between what was measured; otherwise `step_s` extrapolates."""
        return (
            self.batches[0] <= num_sequences <= self.batches[-1]
            and self.lookaheads[0] <= lookahead <= self.lookaheads[-1]
        )

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **self._asdict()}

    def write(self, path: Path) -> None:
        """In place of what was there, at once. Raises SpeculationError: the file cannot be written."""
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file in place of what was there, at once. Raises SpeculationError: it cannot be written."""
    try:
        cached_folder.write_whole(path, text)
    except OSError as error:
        raise SpeculationError(f"cannot write {path}: {error.strerror}; name a file that can be written.") from None


def read_table(path: Path) -> LatencyTable:
    """Raises SpeculationError: no such file, or no table."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise SpeculationError(f"cannot read the table {path}: {error.strerror}; {AGAIN}.") from None
    except (ValueError, RecursionError) as error:
        raise SpeculationError(f"{path} is not JSON ({error}); {AGAIN}.") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise SpeculationError(f"{path} is no table of step times; {AGAIN}.")
    if found.get("version") != VERSION:
        raise SpeculationError(f"{path} has version {found.get('version')!r}, this is {VERSION}; {AGAIN}.")
    if wrong := _wrong(found):
        raise SpeculationError(f"{path}: {wrong}; {AGAIN}.")
    return LatencyTable(
        tuple(found["batches"]), tuple(found["lookaheads"]), tuple(map(tuple, found["seconds"])),
        tuple(map(tuple, found["num_samples"])), float(found["context"]), found["facts"],
    )  # fmt: skip


def _wrong(found: dict[str, Any]) -> str:
    """Return what is wrong with it, in words, or an empty text."""
    for name, least in (("batches", 1), ("lookaheads", 0)):
        axis = found.get(name)
        if not _is_list_of(axis, int) or not axis or axis[0] < least or axis != sorted(set(axis)):
            return f"{name} is {axis!r}, where ascending whole numbers from {least} were expected"
    if found["lookaheads"][0] != 0:
        return f"lookaheads begin with {found['lookaheads'][0]}; steps without guesses are needed to compare with"
    shape = len(found["batches"]), len(found["lookaheads"])
    for name, kind in (("seconds", (int, float)), ("num_samples", int)):
        rows = found.get(name)
        if not isinstance(rows, list) or len(rows) != shape[0] or not all(
            _is_list_of(row, kind) and len(row) == shape[1] for row in rows
        ):
            return f"{name} is no table of {shape[0]} by {shape[1]} numbers"
    if not all(math.isfinite(each) and each > 0 for row in found["seconds"] for each in row):
        return "seconds has numbers that are no times"
    context = found.get("context")
    if not _is_list_of([context], (int, float)) or not math.isfinite(context) or context < 0:
        return f"context is {context!r}, no number of tokens"
    return "" if isinstance(found.get("facts"), dict) else "facts are missing"


def _is_list_of(values: Any, kind: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, kind) and not isinstance(each, bool) for each in values)


def _along(axis: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """`values` [len(axis), ...] at the places `at`, linear, and beyond the ends too."""
    if len(axis) == 1:
        return np.broadcast_to(values[0], (len(at), *values.shape[1:]))
    left = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, len(axis) - 2)
    share = (at - axis[left]) / (axis[left + 1] - axis[left])
    share = share.reshape(-1, *[1] * (values.ndim - 1))
    return values[left] + share * (values[left + 1] - values[left])
