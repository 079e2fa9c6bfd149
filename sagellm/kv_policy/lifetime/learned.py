"""The lifetime as a regression learns it while it serves."""

import math

import numpy as np

from sagellm.core.errors import PolicyError
from sagellm.kv_policy.lifetime.base import NUM_USES_APART, GapPredictor, Seen
from sagellm.kv_policy.lifetime.ratios import LogRatios

__all__ = ["LearnedLifetime"]

NUM_FEATURES = 5
MOST_UNCERTAIN = 1e6


class LearnedLifetime(GapPredictor):
    """log(gap) is linear in: 1, whether the block came back before, log of the number of its uses, log of its last gap, mean
    log of its gaps. Fitted by recursive least squares at each return; how far gaps were from what was predicted, apart for
    blocks with one, two and more uses, gives the quantiles.

    Args:
        forgetting: weight of the past at each gap, above 0, at most 1.

    Source: Haykin, Adaptive Filter Theory (RLS with exponential forgetting).
    """

    name = "learned"

    def __init__(self, forgetting: float = 0.9999, max_keys: int = 200_000) -> None:
        super().__init__(max_keys)
        if isinstance(forgetting, bool) or not isinstance(forgetting, (int, float)) or not 0 < forgetting <= 1:
            raise PolicyError(
                f"lifetime predictor learned: forgetting={forgetting!r}; give a number above 0 and at most 1."
            )
        self._forgetting = forgetting
        self._weights = np.zeros(NUM_FEATURES)
        self._inverse = np.eye(NUM_FEATURES) * 100.0  # of the features' weighted correlation matrix
        self._ratios = [LogRatios(prior=2) for _ in range(3)]
        self._num_gaps = 0

    def _learn(self, seen: Seen, gap_s: float) -> None:
        features = _features(seen)
        log_gap = math.log(gap_s)
        error = log_gap - float(features @ self._weights)
        if self._num_gaps >= 2 * NUM_FEATURES:  # the first errors tell of zero weights, not of blocks
            self._ratios_of(seen).add(error)
        self._num_gaps += 1
        projected = self._inverse @ features
        gain = projected / (self._forgetting + float(features @ projected))
        self._weights = self._weights + gain * error
        inverse = self._inverse - np.outer(gain, projected)
        self._inverse = (inverse + inverse.T) / 2  # rounding would let it drift from symmetry
        if np.trace(self._inverse) < MOST_UNCERTAIN:  # features that do not occur would let it grow without end
            self._inverse /= self._forgetting

    def _predict(self, seen: Seen | None, age_s: float, quantile: float) -> float:
        if self._num_gaps == 0:
            return math.inf
        seen = seen or Seen(0.0)
        expected = float(_features(seen) @ self._weights)
        above = math.log(age_s) - expected if age_s > 0 else -math.inf
        log_gap = expected + self._ratios_of(seen).quantile(quantile, above)
        return max(0.0, math.exp(min(log_gap, 700.0)) - age_s) if log_gap < math.inf else math.inf

    def _survival(self, seen: Seen | None, gap_s: float) -> float:
        if self._num_gaps == 0 or gap_s <= 0:
            return 1.0
        seen = seen or Seen(0.0)
        return self._ratios_of(seen).survival(math.log(gap_s) - float(_features(seen) @ self._weights))

    def _ratios_of(self, seen: Seen) -> LogRatios:
        return self._ratios[min(seen.num_uses, 3) - 1]


def _features(seen: Seen) -> np.ndarray:
    if seen.num_uses == 1:
        return np.array([1.0, 0.0, 0.0, 0.0, 0.0])
    uses = math.log(min(seen.num_uses, NUM_USES_APART))
    return np.array([1.0, 1.0, uses, math.log(seen.last_gap_s), seen.mean_log_gap])
