"""How long a step takes, learned from the steps that were measured."""

import math
from collections.abc import Sequence
from operator import mul

from sagellm.core.hooks import Phase, StepResult

__all__ = ["LinearFit", "StepTimes"]

FORGET = 0.98  # of the weight of a sample with each later one of about its size: half is gone after 34
FADE = 0.999  # with each later one of any size
DRIFT, DRIFT_FADE = 0.25, 0.7  # beyond this mean error, a logarithm, all that was learned is out of date, and fades so fast
PRIOR_WEIGHT = 1e-6  # of a default that is off by as much as itself, beside a sample that is
LEAST_S = 1e-4  # a shorter step is as good as any of this length
MANY = 8  # samples from which on one that is far off is cut
FAR = 4.0  # times the prediction, or its inverse


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
            found = _eliminate(matrix, right)
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
            self.prefill.add((1.0, tokens, _pairs(tokens, context, num_requests)), seconds)
        else:
            self.decode.add((1.0, num_requests, context), seconds)

    def prefill_s(self, tokens: float, context: float = 0, num_requests: int = 1) -> float:
        """Return the seconds of a step with so many new tokens, after so many that were computed before."""
        return self.prefill.predict((1.0, tokens, _pairs(tokens, context, num_requests)))

    def decode_s(self, batch: float, context: float = 0) -> float:
        """Return the seconds of a step of `batch` requests that have `context` tokens together."""
        return self.decode.predict((1.0, batch, context))

    def tokens_within(self, seconds: float, context: float = 0) -> int:
        """The most new tokens of one request whose prefill step takes no longer; 0 where not even one does."""
        base, per_token, per_pair = self.prefill.coefficients
        linear, left = per_token + per_pair * context, min(seconds, 3600.0) - base
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


def _pairs(tokens: float, context: float, num_requests: int) -> float:
    """Seconds of a token and one that it attends to, if the tokens are spread evenly."""
    return tokens * (context + tokens / 2) / max(num_requests, 1)


def _eliminate(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solves a small symmetric positive definite system."""
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
