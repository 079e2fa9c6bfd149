"""Whether draws come from a distribution."""

from collections.abc import Sequence

import numpy as np

__all__ = ["BROKEN_SIGMAS", "deviation"]

# A right engine is that far off once in 30,000 checks; seeds are fixed, so a verdict stays what it is.
BROKEN_SIGMAS = 4.0
LEAST_EXPECTED = 5.0  # draws of a class, under which the statistic is no chi-square


def deviation(draws: Sequence[int], probabilities: np.ndarray) -> tuple[float, int]:
    """How far a sample is from its distribution: (standard deviations of a normal variable, number of classes).

    Pearson's chi-square over the values that are expected at least five times and one class of all others, brought to a normal
    variable by its cube root.

    Args:
        draws: values from 0.
        probabilities: float [values], sum 1.

    Source: Wilson and Hilferty, 1931.
    """
    expected = len(draws) * probabilities
    found = np.bincount(draws, minlength=len(probabilities))
    is_own = expected >= LEAST_EXPECTED
    wanted = [*expected[is_own], expected[~is_own].sum()]
    seen = [*found[is_own], found[~is_own].sum()]
    if wanted[-1] < LEAST_EXPECTED and len(wanted) > 1:  # too few for a class of their own
        wanted[-2:], seen[-2:] = [wanted[-2] + wanted[-1]], [seen[-2] + seen[-1]]
    freedom = len(wanted) - 1
    if freedom < 1:
        return 0.0, len(wanted)
    square = sum((one - other) ** 2 / other for one, other in zip(seen, wanted, strict=True))
    spread = 2 / (9 * freedom)
    return ((square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5, len(wanted)
