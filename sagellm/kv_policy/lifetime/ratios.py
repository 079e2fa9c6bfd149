"""How far gaps were from what was expected of them: an empirical distribution that turns an expectation into quantiles."""

import math

import numpy as np

__all__ = ["LogRatios"]

WIDTH = 0.125  # of a bin, in natural logarithms: 13%
NOTHING = 1e-9  # of all ratios: what is left of the tail of the first guess, or of rounding
SPAN = 24.0  # ratios from exp(-24) to exp(24)


class LogRatios:
    """A histogram of log(gap / expected) that forgets: what is older than `memory` ratios weighs less than 1/e.

    Before the first ratio it is that of an exponential gap around its mean, which `prior` ratios would have to outweigh.
    """

    def __init__(self, memory: float = 20_000, prior: float = 20) -> None:
        edges = np.linspace(-SPAN, SPAN, int(2 * SPAN / WIDTH) + 1)
        self._edges = edges
        self._counts = prior * np.diff(-np.exp(-np.exp(np.minimum(edges, 5.0))))
        self._cumulative: np.ndarray | None = None
        self._growth = math.exp(1 / memory)
        self._weight = 1.0  # of the next ratio: growing weights forget without touching every bin
        self.num_added = 0

    def add(self, log_ratio: float) -> None:
        place = min(max(int((log_ratio + SPAN) / WIDTH), 0), len(self._counts) - 1)
        self._counts[place] += self._weight
        self._cumulative = None
        self.num_added += 1
        self._weight *= self._growth
        if self._weight > 1e12:
            self._counts /= self._weight
            self._weight = 1.0

    def quantile(self, quantile: float, above: float = -math.inf) -> float:
        """Return the log ratio below which this share lies, of those above `above`; infinity if no ratio is above it."""
        cumulative = self._sums()
        total = cumulative[-1]
        passed = float(np.interp(above, self._edges, cumulative)) if above > -SPAN else 0.0
        if total - passed <= NOTHING * total:
            return math.inf
        wanted = passed + quantile * (total - passed)
        place = min(int(np.searchsorted(cumulative, wanted, side="left")), len(cumulative) - 1)
        place = max(place, 1)
        in_bin = cumulative[place] - cumulative[place - 1]
        share = (wanted - cumulative[place - 1]) / in_bin if in_bin > 0 else 1.0
        return max(float(self._edges[place - 1] + share * WIDTH), above)

    def survival(self, log_ratio: float) -> float:
        """The share of ratios above this one."""
        cumulative = self._sums()
        share = 1.0 - float(np.interp(log_ratio, self._edges, cumulative)) / cumulative[-1]
        return float(share) if share > NOTHING else 0.0

    def _sums(self) -> np.ndarray:
        """Ratios below each edge, together."""
        if self._cumulative is None:
            self._cumulative = np.concatenate(([0.0], np.cumsum(self._counts)))
        return self._cumulative
