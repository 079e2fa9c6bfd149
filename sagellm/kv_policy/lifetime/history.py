"""The lifetime from a block's own past."""

import math

from sagellm.core.errors import PolicyError
from sagellm.kv_policy.lifetime.base import Seen
from sagellm.kv_policy.lifetime.exponential import ExponentialLifetime
from sagellm.kv_policy.lifetime.ratios import LogRatios

__all__ = ["HistoryLifetime"]


class HistoryLifetime(ExponentialLifetime):
    """A block that came back `min_gaps` times comes back after the geometric mean of its gaps, times a ratio; the ratios of all
    such blocks so far give the quantiles. Others are predicted as `ExponentialLifetime` does."""

    name = "history"

    def __init__(self, min_gaps: int = 1, max_keys: int = 200_000) -> None:
        super().__init__(max_keys)
        if isinstance(min_gaps, bool) or not isinstance(min_gaps, int) or min_gaps < 1:
            raise PolicyError(f"lifetime predictor history: min_gaps={min_gaps!r}; give a whole number of at least 1.")
        self._min_gaps = min_gaps
        self._ratios = LogRatios()

    def _learn(self, seen: Seen, gap_s: float) -> None:
        if self._has_history(seen):
            self._ratios.add(math.log(gap_s) - seen.mean_log_gap)
        else:
            super()._learn(seen, gap_s)

    def _predict(self, seen: Seen | None, age_s: float, quantile: float) -> float:
        if seen is None or not self._has_history(seen):
            return super()._predict(seen, age_s, quantile)
        above = math.log(age_s) - seen.mean_log_gap if age_s > 0 else -math.inf
        return max(0.0, math.exp(seen.mean_log_gap + self._ratios.quantile(quantile, above)) - age_s)

    def _survival(self, seen: Seen | None, gap_s: float) -> float:
        if seen is None or not self._has_history(seen):
            return super()._survival(seen, gap_s)
        return self._ratios.survival(math.log(gap_s) - seen.mean_log_gap) if gap_s > 0 else 1.0

    def _has_history(self, seen: Seen) -> bool:
        return seen.num_uses > self._min_gaps
