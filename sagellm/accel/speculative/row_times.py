"""Cost of a decode step, learned from past steps by number of sequences and of rows."""

import math
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from sagellm.core.step_times import solve

__all__ = ["RowTimes", "StepTable"]

ENOUGH = 32  # steps of one size, the latest, that are learned from where many have come at once: twice what a cell holds
RING = 15  # samples of a cell; its median is what counts, so that a step which the machine held up changes nothing
MEMORY = 400  # steps after which what a cell knows counts half
DEFAULT_SLOPE = 0.25  # of a row that was not measured, in shares of a row's part of a plain step
BELIEF = 0.01  # how much that counts beside a step
CORRECTION_RATE = 0.05
FORGET = 0.99
MOST_A_ROW = 1.1
MOST_UNREAD = 512  # steps

_extra_of = attrgetter("extra")


class StepTable(Protocol):
    """Seconds that were measured before, on the same machine and model."""

    def step_s(self, num_sequences: float, lookahead: np.ndarray) -> np.ndarray: ...


class _Cell:
    """The latest steps of one size."""

    def __init__(self) -> None:
        self.samples: deque[tuple[int, float]] = deque(maxlen=RING)  # (further rows, seconds)
        self.extra = self.seconds = 0.0
        self.latest = 0

    def add(self, extra: int, seconds: float, number: int) -> None:
        self.samples.append((extra, seconds))
        self.latest = number
        self.extra = sum([rows for rows, _ in self.samples]) / len(self.samples)
        ordered = sorted([each for _, each in self.samples])
        self.seconds = ordered[(len(ordered) - 1) // 2]  # the lower one of two in the middle: one of them may be held up


class RowTimes:
    """Seconds of a step of N sequences and N + e rows.

    Steps of about the same N and e share a cell, of which the median counts. Where no step has been, a line in N and rows
    through all steps (weighted least squares that forgets), or a table, says how the cost goes on. All of it is multiplied by
    one correction, observed by predicted, that follows what slows every step alike: longer contexts, a busier machine.

    Args:
        table: measured before; without it a row is believed to be cheap until it has been seen.
    """

    def __init__(self, table: StepTable | None = None) -> None:
        self._table = table
        self._cells: dict[int, dict[int, _Cell]] = {}
        self._moments = (0.0,) * 6  # of (1, sequences, rows) by seconds: the upper triangle, row by row
        self._sums = (0.0,) * 3
        self._lines: dict[int, tuple[float, float]] = {}  # by sequences; of what has been learned so far
        self._correction = 1.0
        self.num_steps = 0
        self._unread: list[tuple[int, int, float]] = []

    def add(self, num_sequences: int, num_rows: int, seconds: float) -> None:
        """A step took so long. Times of 0 are skipped.

        It is learned from when somebody asks: between two steps of a model nothing is in the caches, and the same lines take
        ten times as long as in one go later.
        """
        if num_sequences > 0 and seconds > 0 and math.isfinite(seconds):
            self._unread.append((num_sequences, num_rows, seconds))
            if len(self._unread) >= MOST_UNREAD:
                self._learn()

    @property
    def correction(self) -> float:
        self._learn()
        return self._correction

    def _learn(self) -> None:
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        latest = unread if len(unread) <= ENOUGH else _latest(unread)
        self.num_steps += len(unread) - len(latest)
        for step in latest:
            self._learn_from(*step)

    def _learn_from(self, num_sequences: int, num_rows: int, seconds: float) -> None:
        extra = max(0, num_rows - num_sequences)
        self.num_steps += 1
        cells = self._cells.setdefault(_batch(num_sequences), {})
        cell = cells.get(_place(extra))
        if cell is not None or self._table is not None:
            self._correct(seconds / self._plain(num_sequences, extra))
        if cell is None:
            cell = cells[_place(extra)] = _Cell()
        seconds /= self._correction
        if 0 in cells and extra:  # rows cannot cost more than as many plain steps: then something else held it up
            seconds = min(seconds, MOST_A_ROW * cells[0].seconds * num_rows / num_sequences)
        cell.add(extra, seconds, self.num_steps)
        one, by_sequence, by_row = 1.0 / seconds, num_sequences / seconds, num_rows / seconds  # so errors count by their share
        m11, m12, m13, m22, m23, m33 = self._moments
        self._moments = (
            FORGET * m11 + one * one, FORGET * m12 + one * by_sequence, FORGET * m13 + one * by_row,
            FORGET * m22 + by_sequence * by_sequence, FORGET * m23 + by_sequence * by_row, FORGET * m33 + by_row * by_row,
        )  # fmt: skip
        s1, s2, s3 = self._sums
        self._sums = FORGET * s1 + one, FORGET * s2 + by_sequence, FORGET * s3 + by_row
        self._lines.clear()

    def knows(self, num_sequences: int) -> bool:
        """Whether the cost of a step without guesses has been seen, or is in the table."""
        self._learn()
        return self._table is not None or 0 in self._cells.get(_batch(num_sequences), {})

    def usual(self, num_sequences: int, extra: int) -> float | None:
        """Seconds that such steps took; None where too few were made to say."""
        self._learn()
        cell = self._cells.get(_batch(num_sequences), {}).get(_place(extra))
        return None if cell is None or len(cell.samples) < 3 else cell.seconds * self._correction

    def largest(self, num_sequences: int) -> int:
        """The most further rows that a step of this size has had."""
        self._learn()
        cells = self._cells.get(_batch(num_sequences), {})
        return max((round(cell.extra) for cell in cells.values()), default=0)

    def plain(self, num_sequences: int, extra: int = 0) -> float:
        """Seconds of a step with `extra` further rows."""
        self._learn()
        return self._plain(num_sequences, extra)

    def _plain(self, num_sequences: int, extra: int) -> float:
        if not extra:  # in every step: it has to be quick
            cell = self._cells.get(_batch(num_sequences), {}).get(0)
            if cell is not None:
                return cell.seconds * self._correction
        return self._curve(num_sequences, extra)[extra]

    def curve(self, num_sequences: int, most: int) -> list[float]:
        """Seconds of steps with 0 to `most` further rows: never falling."""
        self._learn()
        return self._curve(num_sequences, most)

    def _curve(self, num_sequences: int, most: int) -> list[float]:
        guess = self._without_cells(num_sequences, range(most + 1))
        cells = self._cells.get(_batch(num_sequences))
        if cells:
            known = sorted(cells.values(), key=_extra_of)
            at = [cell.extra for cell in known]
            believed = self._without_cells(num_sequences, at)
            ratios = [self._ratio(cell, each) for cell, each in zip(known, believed, strict=True)]
            guess = [each * _between(at, ratios, extra) for extra, each in enumerate(guess)]
        correction = self._correction
        return [each * correction for each in accumulate(guess, max)]

    def report(self) -> dict[str, Any]:
        """`plain_s`: of a step without guesses, by number of sequences."""
        self._learn()
        plain = {str(batch): self.plain(batch) for batch, cells in sorted(self._cells.items()) if 0 in cells}
        return {"correction": self.correction, "plain_s": plain, "from_table": self._table is not None}

    def _correct(self, ratio: float) -> None:
        if self._table is not None and self.num_steps <= 8:  # a table of another day: get near it at once
            rate = 1 / self.num_steps
        else:
            rate, ratio = CORRECTION_RATE, min(2.0, max(0.5, ratio))
        self._correction *= ratio**rate

    def _ratio(self, cell: _Cell, believed: float) -> float:
        """The samples of a cell over its prior; few or old samples count less."""
        weight = len(cell.samples) * 0.5 ** ((self.num_steps - cell.latest) / MEMORY)
        share = 1.0 if _place(round(cell.extra)) == 0 else weight / (weight + 2)
        return (cell.seconds / believed) ** share

    def _without_cells(self, num_sequences: int, extras: Sequence[float]) -> list[float]:
        if self._table is not None:
            return self._table.step_s(num_sequences, np.array(extras) / num_sequences).tolist()
        if not self.num_steps:
            return [1.0] * len(extras)
        line = self._lines.get(num_sequences)
        if line is None:
            line = self._lines[num_sequences] = self._line(num_sequences)
        base, slope = line
        return [base + slope * extra for extra in extras]

    def _line(self, num_sequences: int) -> tuple[float, float]:
        """(seconds of a plain step, of a further row). Rows that were never seen alone cost `DEFAULT_SLOPE`."""
        n = float(num_sequences)
        cell = self._cells.get(_batch(num_sequences), {}).get(0)
        plain = cell.seconds if cell is not None else None
        m11, m12, m13, m22, m23, m33 = self._moments
        s1, s2, s3 = self._sums
        scale = plain or s1 / m11
        # Beliefs as weak observations: a row costs its default; a plain step grows with its sequences by half of itself.
        a_row, a_sequence = n / scale, 1.0 / scale
        m33 += BELIEF * a_row * a_row
        s3 += BELIEF * DEFAULT_SLOPE * a_row
        m11 += 1e-3 * a_sequence * a_sequence
        m12 -= 1e-3 * n * a_sequence * a_sequence
        m22 += 1e-3 * n * n * a_sequence * a_sequence
        ridge = 1e-9 * (m11 + m22 + m33)
        constant, by_sequence, by_row = solve(
            [[m11 + ridge, m12, m13], [m12, m22 + ridge, m23], [m13, m23, m33 + ridge]], [s1, s2, s3]
        )
        base = plain if plain is not None else max(constant + (by_sequence + by_row) * n, 1e-9)
        return base, max(0.0, by_row)


def _latest(steps: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """The last `ENOUGH` of each size, in order."""
    counts: dict[tuple[int, int], int] = {}
    kept = []
    for step in reversed(steps):
        size = step[0], step[1]
        count = counts[size] = counts.get(size, 0) + 1
        if count <= ENOUGH:
            kept.append(step)
    kept.reverse()
    return kept


def _between(at: list[float], values: list[float], place: float) -> float:
    """The line through points in rising order; level before the first and behind the last."""
    number = bisect(at, place)
    if number == 0 or number == len(at):
        return values[max(0, number - 1)]
    low, high = at[number - 1], at[number]
    return values[number - 1] + (values[number] - values[number - 1]) * (place - low) / (high - low)


def _batch(num_sequences: int) -> int:
    """A number of sequences that stands for all near it: 1, 2, 3, 4, and then four to an octave."""
    return num_sequences if num_sequences <= 4 else round(2 ** (round(4 * math.log2(num_sequences)) / 4))


def _place(extra: int) -> int:
    """Numbers of further rows that share a cell: 0 to 4 stand alone, then two to an octave."""
    return extra if extra <= 4 else round(2 * math.log2(extra))
