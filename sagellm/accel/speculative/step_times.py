"""What a decode step costs: learned from the steps that were made, by number of sequences and of rows."""

import math
from collections import deque
from typing import Any, Protocol

import numpy as np

__all__ = ["StepTable", "StepTimes"]

RING = 15  # samples of a cell; its median is what counts, so that a step which the machine held up changes nothing
MEMORY = 400  # steps after which what a cell knows counts half
DEFAULT_SLOPE = 0.25  # of a row that nobody has measured, in shares of a row's part of a plain step
BELIEF = 0.01  # how much that counts beside a step
CORRECTION_RATE = 0.05
FORGET = 0.99
MOST_A_ROW = 1.1
MOST_UNREAD = 512  # steps


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


class StepTimes:
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
        self._moments = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._correction = 1.0
        self.num_steps = 0
        self._unread: list[tuple[int, int, float]] = []

    def add(self, num_sequences: int, num_rows: int, seconds: float) -> None:
        """A step took so long. What is no time at all is passed over.

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
        unread, self._unread = self._unread, []
        for step in unread:
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
        features = np.array([1.0, num_sequences, num_rows]) / seconds  # so errors count by their share
        self._moments *= FORGET
        self._moments += features[:, None] * features
        self._sums *= FORGET
        self._sums += features

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
        return float(self._curve(num_sequences, extra)[extra])

    def curve(self, num_sequences: int, most: int) -> np.ndarray:
        """Seconds, float64 [most + 1], of steps with 0 to `most` further rows: never falling."""
        self._learn()
        return self._curve(num_sequences, most)

    def _curve(self, num_sequences: int, most: int) -> np.ndarray:
        extra = np.arange(most + 1)
        guess = self._without_cells(num_sequences, extra)
        cells = self._cells.get(_batch(num_sequences))
        if cells:
            known = sorted(cells.values(), key=lambda cell: cell.extra)
            at = np.array([cell.extra for cell in known])
            believed = self._without_cells(num_sequences, at)
            ratio = np.array([self._ratio(cell, each) for cell, each in zip(known, believed.tolist(), strict=True)])
            guess = guess * np.interp(extra, at, ratio)
        return np.maximum.accumulate(guess) * self._correction

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
        """What a cell has seen, by what is believed without it; few or old samples count less."""
        weight = len(cell.samples) * 0.5 ** ((self.num_steps - cell.latest) / MEMORY)
        share = 1.0 if _place(round(cell.extra)) == 0 else weight / (weight + 2)
        return (cell.seconds / believed) ** share

    def _without_cells(self, num_sequences: int, extra: np.ndarray) -> np.ndarray:
        if self._table is not None:
            return self._table.step_s(num_sequences, extra / num_sequences)
        if not self.num_steps:
            return np.ones(len(extra))
        base, slope = self._line(num_sequences)
        return base + slope * extra

    def _line(self, num_sequences: int) -> tuple[float, float]:
        """(seconds of a plain step, of a further row). Rows that were never seen alone cost `DEFAULT_SLOPE`."""
        n = float(num_sequences)
        cell = self._cells.get(_batch(num_sequences), {}).get(0)
        plain = cell.seconds if cell is not None else None
        scale = plain or self._sums[0] / self._moments[0, 0]
        # Beliefs as weak observations: a row costs its default; a plain step grows with its sequences by half of itself.
        a_row = np.array([0.0, 0.0, n]) / scale
        a_sequence = np.array([1.0, -n, 0.0]) / scale
        moments = self._moments + BELIEF * np.outer(a_row, a_row) + 1e-3 * np.outer(a_sequence, a_sequence)
        sums = self._sums + BELIEF * DEFAULT_SLOPE * a_row
        constant, by_sequence, by_row = np.linalg.solve(moments + 1e-9 * np.trace(moments) * np.eye(3), sums)
        base = plain if plain is not None else max(constant + (by_sequence + by_row) * n, 1e-9)
        return float(base), float(max(0.0, by_row))


def _batch(num_sequences: int) -> int:
    """A number of sequences that stands for all near it: 1, 2, 3, 4, and then four to an octave."""
    return num_sequences if num_sequences <= 4 else round(2 ** (round(4 * math.log2(num_sequences)) / 4))


def _place(extra: int) -> int:
    """Numbers of further rows that share a cell: 0 to 4 stand alone, then two to an octave."""
    return extra if extra <= 4 else round(2 * math.log2(extra))
