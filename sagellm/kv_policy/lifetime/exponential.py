"""The memoryless lifetime: one mean gap for all blocks of a tier."""

import math

from sagellm.kv_policy.lifetime.base import GapPredictor, Seen

__all__ = ["ExponentialLifetime"]


class ExponentialLifetime(GapPredictor):
    """Gaps are exponential with the mean of all gaps seen, so that the time already waited says nothing."""

    name = "exponential"

    def __init__(self, max_keys: int = 200_000) -> None:
        super().__init__(max_keys)
        self._num_gaps = 0
        self._sum_s = 0.0

    def _learn(self, seen: Seen, gap_s: float) -> None:
        self._num_gaps += 1
        self._sum_s += gap_s

    def _predict(self, seen: Seen | None, age_s: float, quantile: float) -> float:
        if self._num_gaps == 0:
            return math.inf
        return -self._sum_s / self._num_gaps * math.log1p(-quantile)

    def _survival(self, seen: Seen | None, gap_s: float) -> float:
        return math.exp(-gap_s * self._num_gaps / self._sum_s) if self._num_gaps else 1.0
