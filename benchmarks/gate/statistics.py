"""Tests and intervals over runs. A run is one value: samples inside it share a server and a moment, so they do not count.

Every estimate is of head - base in units where more is worse.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
FEWEST_RUNS = 3
FEWEST_TO_RESAMPLE = 10
NUM_RESAMPLES = 4999


class Estimate(NamedTuple):
    """`p` is one-sided: the chance of a value this large, or larger, if nothing had changed."""

    value: float
    low: float
    high: float
    p: float
    exact: bool
    method: str


def blocked(table: np.ndarray, weights: Sequence[float]) -> Estimate:
    """A contrast of contestants that were interleaved round by round.

    table: float[num_rounds, num_contestants]; weights: one a contestant, of sum 0. An effect on a whole round cancels
    out. The
    variance is pooled over all contestants (randomized blocks), which gives (rounds - 1) * (contestants - 1) degrees of
    freedom: with two it is the paired t test, with a control twice as many. Identical code has one variance, so the rate
    of false alarms is the nominal one whatever a slower head does to its own.
    """
    num_rounds, num_contestants = table.shape
    weight = np.asarray(weights, dtype=float)
    residual = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0) + table.mean()
    df = (num_rounds - 1) * (num_contestants - 1)
    variance = float((residual**2).sum()) / df
    error = math.sqrt(variance * float(weight @ weight) / num_rounds)
    return _by_student(float(table.mean(axis=0) @ weight), error, df, float(np.abs(table).max()), "paired t")


def unpaired(base: np.ndarray, head: np.ndarray) -> Estimate:
    """Runs that have no partners: bootstrap-t where there are enough to resample, Welch's t test otherwise.

    A handful of values has resamples that hardly vary, and dividing by their spread makes tails of chance; the thousandths
    that Holm's procedure asks for lie there.
    """
    if min(len(base), len(head)) < FEWEST_TO_RESAMPLE:
        return welch(base, head)
    return bootstrap(base, head)


def welch(base: np.ndarray, head: np.ndarray) -> Estimate:
    parts = [float(side.var(ddof=1)) / len(side) for side in (base, head)]
    variance = sum(parts)
    largest = float(max(np.abs(base).max(), np.abs(head).max()))
    spread = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (base, head), strict=True))
    df = variance**2 / spread if spread > 0 else 1.0
    return _by_student(float(head.mean() - base.mean()), math.sqrt(variance), df, largest, "Welch t")


def bootstrap(base: np.ndarray, head: np.ndarray, seed: int = 0) -> Estimate:
    """Bootstrap-t: resamples the studentized difference, which the plain percentiles of small samples are too narrow for.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 12.
    """
    value = float(head.mean() - base.mean())
    error = math.sqrt(base.var(ddof=1) / len(base) + head.var(ddof=1) / len(head))
    if _negligible(error, float(max(np.abs(base).max(), np.abs(head).max()))):
        return _exact(value)
    (base_means, base_errors), (head_means, head_errors) = _resampled(base, seed), _resampled(head, seed + 1)
    drawn_error = np.sqrt(base_errors + head_errors)
    # A resample of one value over and over has no spread to divide by.
    varied = drawn_error > 1e-6 * error
    drawn = (head_means - base_means)[varied] / drawn_error[varied]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail]).tolist()
    p = (1 + int((drawn >= value / error).sum())) / (1 + len(drawn))
    return Estimate(value, value - high * error, value - low * error, p, False, "bootstrap")


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which are significant when at most `alpha` of families of true nulls may have any that is. Source: Holm, 1979."""
    significant = [False] * len(p_values)
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in enumerate(order):
        if p_values[index] > alpha / (len(order) - rank):
            break
        significant[index] = True
    return significant


def student_tail(t: float, df: float) -> float:
    """P(T >= t)."""
    half = 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))
    return half if t >= 0 else 1 - half


@lru_cache(maxsize=4096)
def student_quantile(tail: float, df: float) -> float:
    """The t that P(T >= t) = tail holds for; 0 < tail <= 0.5."""
    high = 1.0
    while student_tail(high, df) > tail:
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, df) > tail else (low, middle)
    return (low + high) / 2


def _by_student(value: float, error: float, df: float, largest: float, method: str) -> Estimate:
    if _negligible(error, largest):
        return _exact(value if not _negligible(abs(value), largest) else 0.0)
    # Welch's degrees of freedom are any real number; a tenth of one is as fine as the cache needs.
    reach = student_quantile((1 - CONFIDENCE) / 2, math.floor(df * 10) / 10) * error
    return Estimate(value, value - reach, value + reach, student_tail(value / error, df), False, method)


def _exact(value: float) -> Estimate:
    return Estimate(value, value, value, 0.0 if value > 0 else 1.0, True, "exact")


def _negligible(error: float, largest: float) -> bool:
    """Rounding of values that are equal."""
    return error <= 1e-12 * (1 + largest)


def _resampled(side: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Means around that of `side`, and their squared standard errors: float[NUM_RESAMPLES] each."""
    size = len(side)
    centred = side - side.mean()
    counts = _resample_counts(size, seed)
    means = counts @ centred / size
    return means, np.maximum(counts @ centred**2 / size - means**2, 0) / (size - 1)


@lru_cache(maxsize=64)
def _resample_counts(size: int, seed: int) -> np.ndarray:
    """How often each value is drawn: float[NUM_RESAMPLES, size]. Fixed, so the same files always get the same verdict."""
    return np.random.default_rng((seed, size)).multinomial(size, [1 / size] * size, NUM_RESAMPLES).astype(float)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularized, by its continued fraction. Source: Press et al., Numerical Recipes, 6.4."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Lentz's method; converges in tens of terms for every x that `_incomplete_beta` sends here."""
    d = 1 / _nonzero(1 - (a + b) * x / (a + 1))
    c, value = 1.0, d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _nonzero(1 + term * d)
            c = _nonzero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return value


def _nonzero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300
