"""Fits of measured times as sums of few terms, none negative: `fit_held_out` of a batch, `LinearFit` while samples come.

The terms of a step are the same for every user: a constant, tokens and pairs of a prefill step; a constant, requests and
context of a decode step (`prefill_terms`, `decode_terms`).
"""

import math
from collections.abc import Sequence
from itertools import combinations
from operator import mul

import numpy as np

from sagellm.core.config import Model
from sagellm.core.errors import PolicyError
from sagellm.core.scheduling import Phase, StepResult

__all__ = ["FitError", "LinearFit", "StepTimes", "decode_terms", "fit_held_out", "num_pairs", "prefill_terms", "solve"]

HELD_OUT = 5  # every fifth sample
FEWEST_SAMPLES = 5

FORGET = 0.98  # of the weight of a sample with each later one of about its size: half is gone after 34
FADE = 0.999  # with each later one of any size
DRIFT, DRIFT_FADE = 0.25, 0.7  # beyond this mean error, a logarithm, all that was learned is out of date, and fades so fast
PRIOR_WEIGHT = 1e-6  # of a default that is off by as much as itself, beside a sample that is
LEAST_S = 1e-4  # a shorter step is as good as any of this length
MANY = 8  # samples from which on one that is far off is cut
FAR = 4.0  # times the prediction, or its inverse


def num_pairs(tokens: float, context: float, num_requests: int = 1) -> float:
    """Return the pairs of a new token and a token before it, which attention reads.

    Args:
        context: tokens that were computed before, summed over the requests, which share all tokens alike.
    """
    return tokens * (context + (tokens - 1) / 2) / max(num_requests, 1)


def prefill_terms(tokens: float, context: float, num_requests: int = 1) -> tuple[float, float, float]:
    return 1.0, tokens, num_pairs(tokens, context, num_requests)


def decode_terms(num_requests: float, context: float) -> tuple[float, float, float]:
    return 1.0, num_requests, context


class FitError(Model):
    """|predicted - measured| / measured over samples that the fit had not seen."""

    num_samples: int
    num_held_out: int
    median: float
    p90: float


def fit_held_out(name: str, rows: Sequence[tuple[Sequence[float], float]]) -> tuple[list[float], FitError]:
    """Coefficients of all samples, and the error of a fit without those held out.

    Args:
        name: what is fitted, for messages.
        rows: (terms, seconds) of each sample.

    Raises:
        PolicyError: fewer than 5 samples, one with times that are not above zero, or no term above zero in any.
    """
    if len(rows) < FEWEST_SAMPLES:
        raise PolicyError(f"{len(rows)} samples of {name}; give at least {FEWEST_SAMPLES}.")
    for terms, seconds in rows:
        if not (0 < seconds < math.inf) or not all(0 <= term < math.inf for term in terms):
            raise PolicyError(f"sample {tuple(terms), seconds} of {name}; sizes are at least 0 and seconds above 0.")
    if not any(any(terms) for terms, _ in rows):
        raise PolicyError(f"samples of {name} are all of size 0; measure larger ones.")
    terms = np.array([row[0] for row in rows], dtype=float)
    seconds = np.array([row[1] for row in rows], dtype=float)
    # Samples come sorted by size as a rule; drawn at random, those held out are of all sizes.
    is_held_out = np.random.default_rng(0).permutation(len(rows)) % HELD_OUT == 0
    predicted = terms[is_held_out] @ _fit(terms[~is_held_out], seconds[~is_held_out])
    errors = np.abs(predicted / seconds[is_held_out] - 1)
    error = FitError(
        num_samples=len(rows),
        num_held_out=len(errors),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
    )
    return _fit(terms, seconds).tolist(), error


def _fit(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Non-negative coefficients with the least squared relative error: the best of all choices of terms whose plain solution
    is not negative. Exact, and quick for the two or three terms there are."""
    relative = terms / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-300)  # bytes and ones differ by nine orders of magnitude
    best, least = np.zeros(terms.shape[1]), math.inf
    for size in range(1, terms.shape[1] + 1):
        for chosen in map(list, combinations(range(terms.shape[1]), size)):
            found, *_ = np.linalg.lstsq(relative[:, chosen] / scale[chosen], np.ones(len(seconds)), rcond=None)
            error = float(((relative[:, chosen] / scale[chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(terms.shape[1]), error
                best[chosen] = found / scale[chosen]
    return best


class LinearFit:
    """y = a + b * x + c * z by least squares of the relative error, recent samples first, no coefficient below zero.

    Samples of one size say nothing of what a step costs whatever its size, and a strategy that settles on a size sees no
    other. So those of each size, to a power of two of the second feature, have memories of their own, which fade slowly, or
    quickly while predictions are off by a quarter on average.

    Before it has seen much it answers by `defaults`, which weigh little: a ridge around them, in units of `scales`, the usual
    size of each feature. A sample that is `FAR` off is cut to that, so that a hiccup moves little, and a true change gets
    through in a few samples. O(1) a sample.
    """

    def __init__(self, defaults: Sequence[float], scales: Sequence[float]) -> None:
        self._scales = tuple(scales)
        self._prior = [value * scale for value, scale in zip(defaults, scales, strict=True)]
        self._prior_weights = [PRIOR_WEIGHT / value**2 for value in self._prior]
        self._drift = 0.0
        self._memories: dict[int, _Memory] = {}  # by the bits of the size
        self._found = list(defaults)
        self._is_stale = False
        self.num_samples = 0

    @property
    def coefficients(self) -> list[float]:
        """In the units of the features."""
        if self._is_stale:
            solved, self._is_stale = self._solve(), False
            self._found = [value / scale for value, scale in zip(solved, self._scales, strict=True)]
        return self._found

    def predict(self, features: Sequence[float]) -> float:
        return sum(map(mul, self.coefficients, features))

    def add(self, features: Sequence[float], value: float) -> None:
        size = int(features[1]).bit_length()
        if self.num_samples >= MANY and (expected := self.predict(features)) > 0:
            value = min(max(value, expected / FAR), expected * FAR)
            self._drift += (math.log(max(value, LEAST_S) / max(expected, LEAST_S)) - self._drift) / MANY
            if abs(self._drift) > DRIFT:
                for memory in self._memories.values():
                    memory.fade(DRIFT_FADE)
        unit = max(value, LEAST_S)
        scaled = [feature / scale / unit for feature, scale in zip(features, self._scales, strict=True)]
        self.num_samples += 1
        self._memories.setdefault(size, _Memory(len(scaled))).add(scaled, value / unit, self.num_samples)
        self._is_stale = True

    def _solve(self) -> list[float]:
        """Least squares around the prior; a coefficient that comes out negative is set to 0, and the others fitted again."""
        size = len(self._prior)
        free = list(range(size))
        solved = [0.0] * size
        moments = [[weight * (row == column) for column in free] for row, weight in enumerate(self._prior_weights)]
        products = [weight * value for weight, value in zip(self._prior_weights, self._prior, strict=True)]
        for memory in self._memories.values():
            weight = FADE ** (self.num_samples - memory.number)
            for row in free:
                products[row] += weight * memory.products[row]
                for column in free:
                    moments[row][column] += weight * memory.moments[row][column]
        while free:
            matrix = [[moments[row][column] for column in free] for row in free]
            right = [products[row] for row in free]
            found = solve(matrix, right)
            if min(found) >= 0:
                for place, value in zip(free, found, strict=True):
                    solved[place] = value
                break
            del free[found.index(min(found))]
        return solved


class _Memory:
    """Sums over the samples of about one size: of features by features, and of features by values. `number`: the last one's."""

    __slots__ = ("moments", "number", "products")

    def __init__(self, size: int) -> None:
        self.moments = [[0.0] * size for _ in range(size)]
        self.products = [0.0] * size
        self.number = 0

    def fade(self, factor: float) -> None:
        self.products = [factor * value for value in self.products]
        self.moments = [[factor * value for value in row] for row in self.moments]

    def add(self, features: Sequence[float], value: float, number: int) -> None:
        self.number = number
        self.fade(FORGET)
        for row, one in enumerate(features):
            self.products[row] += one * value
            self.moments[row] = [old + one * other for old, other in zip(self.moments[row], features, strict=True)]


class StepTimes:
    """Seconds of a prefill step from its tokens and their context, of a decode step from its batch and context.

    A prefill step: a constant, so much a token, and so much a pair of a token and one that it attends to. A decode step: a
    constant, so much a request, and so much a token of context. The defaults are those of a small model on a CPU.
    """

    def __init__(self) -> None:
        self.prefill = LinearFit((0.01, 2e-4, 1e-9), (1.0, 1e3, 1e6))
        self.decode = LinearFit((0.02, 5e-4, 1e-7), (1.0, 10.0, 1e4))

    def observe(self, result: StepResult) -> None:
        """Learn from a step, if it was measured."""
        if not (0 < result.duration_s < 3600 and result.num_requests > 0):
            return
        seconds = max(result.duration_s - max(result.swap_s, 0.0), 1e-9)
        tokens, context, num_requests = result.num_tokens, result.num_context_tokens, result.num_requests
        if max(tokens, context, num_requests) > 1e9:  # no engine's; squares of it would drown all others
            return
        if result.phase is Phase.PREFILL:
            self.prefill.add(prefill_terms(tokens, context, num_requests), seconds)
        else:
            self.decode.add(decode_terms(num_requests, context), seconds)

    def prefill_s(self, tokens: float, context: float = 0, num_requests: int = 1) -> float:
        """Return the seconds of a step with so many new tokens, after so many that were computed before."""
        return self.prefill.predict(prefill_terms(tokens, context, num_requests))

    def decode_s(self, batch: float, context: float = 0) -> float:
        """Return the seconds of a step of `batch` requests that have `context` tokens together."""
        return self.decode.predict(decode_terms(batch, context))

    def tokens_within(self, seconds: float, context: float = 0) -> int:
        """The most new tokens of one request whose prefill step takes no longer; 0 where not even one does."""
        base, per_token, per_pair = self.prefill.coefficients
        linear, left = per_token + per_pair * (context - 0.5), min(seconds, 3600.0) - base
        if left <= 0:
            return 0
        if linear <= 0 and per_pair <= 0:
            return 2**31
        # per_pair / 2 * n**2 + linear * n = left, in the form that loses no digits where per_pair is small
        return int(min(2 * left / (linear + (linear * linear + 2 * per_pair * left) ** 0.5), 2.0**31))

    def report(self) -> dict[str, float]:
        """Coefficients in seconds, and how many steps they were learned from."""
        names = ("constant", "token", "pair"), ("constant", "request", "context")
        fits = ("prefill", self.prefill), ("decode", self.decode)
        found = {
            f"{phase}_{name}_s": value
            for (phase, fit), each in zip(fits, names, strict=True)
            for name, value in zip(each, fit.coefficients, strict=True)
        }
        return found | {f"{phase}_steps": fit.num_samples for phase, fit in fits}


def solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric positive definite system. Changes its arguments. For three rows numpy takes longer."""
    size = len(right)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, size):
                matrix[row][column] -= factor * matrix[pivot][column]
            right[row] -= factor * right[pivot]
    solved = [0.0] * size
    for row in reversed(range(size)):
        known = sum(matrix[row][column] * solved[column] for column in range(row + 1, size))
        solved[row] = (right[row] - known) / matrix[row][row]
    return solved
