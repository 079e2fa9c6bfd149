"""What lifetime predictors share: who was seen when, how often blocks come back, how well predictions are calibrated."""

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sagellm.core.errors import PolicyError
from sagellm.kv_policy.base import BlockKey, LifetimePredictor

__all__ = ["Calibration", "GapPredictor", "Seen", "calibrate", "calibration_error", "reuse_probability"]

QUANTILES = tuple(tenth / 10 for tenth in range(1, 10))
SHORTEST_GAP_S = 1e-3  # clocks of traces and engines tell no less apart
NUM_USES_APART = 16  # blocks used more often than this are counted together


@dataclass(slots=True)
class Seen:
    """What is known of a block: when it was used last, how often, and the gaps between its uses."""

    time_s: float
    num_uses: int = 1
    last_gap_s: float = 0.0  # 0: used once
    mean_log_gap: float = 0.0


class GapPredictor(LifetimePredictor):
    """Predicts the gap until the next use from gaps that were seen. `predict_ttl` speaks of blocks that are found again;
    whether one is at all, `predict_return` says. Infinity while no gap was seen.

    Args:
        max_keys: blocks to know of; the one unseen for longest is forgotten first.
    """

    def __init__(self, max_keys: int = 200_000) -> None:
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise PolicyError(
                f"lifetime predictor {self.name}: max_keys={max_keys!r}; give a whole number of at least 1."
            )
        self._max_keys = max_keys
        self._seen: OrderedDict[BlockKey, Seen] = OrderedDict()
        self._num_used = [0] * (NUM_USES_APART + 1)  # by number of uses so far
        self._num_returned = [0] * (NUM_USES_APART + 1)

    def observe(self, key: BlockKey, time_s: float) -> None:
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = Seen(time_s)
            if len(self._seen) > self._max_keys:
                self._seen.popitem(last=False)
        else:
            gap_s = max(time_s - seen.time_s, SHORTEST_GAP_S)
            self._num_returned[min(seen.num_uses, NUM_USES_APART)] += 1
            self._learn(seen, gap_s)
            seen.mean_log_gap += (math.log(gap_s) - seen.mean_log_gap) / seen.num_uses
            seen.time_s, seen.num_uses, seen.last_gap_s = time_s, seen.num_uses + 1, gap_s
            self._seen.move_to_end(key)
        self._num_used[min(seen.num_uses, NUM_USES_APART)] += 1

    def predict_ttl(self, key: BlockKey, time_s: float, quantile: float = 0.5) -> float:
        """Raises PolicyError: the quantile is not above 0 and below 1."""
        if not 0 < quantile < 1:
            raise PolicyError(f"quantile {quantile!r}; give a number above 0 and below 1.")
        seen = self._seen.get(key)
        age_s = max(0.0, time_s - seen.time_s) if seen is not None else 0.0
        return self._predict(seen, age_s, quantile)

    def predict_return(self, key: BlockKey) -> float:
        """The probability that the block is found again at all: the share among blocks that were used as often, 0 to 1."""
        seen = self._seen.get(key)
        uses = min(seen.num_uses, NUM_USES_APART) if seen is not None else 1
        return (self._num_returned[uses] + 1) / (self._num_used[uses] + 2)

    @property
    def num_gaps(self) -> int:
        """How many gaps it has learned from."""
        return sum(self._num_returned)

    @abstractmethod
    def _learn(self, seen: Seen, gap_s: float) -> None:
        """A block that had been seen like this was found again after this gap."""

    @abstractmethod
    def _predict(self, seen: Seen | None, age_s: float, quantile: float) -> float:
        """Seconds from now, `age_s` after the last use. `seen`: None for a block nobody knows."""


def reuse_probability(predictor: LifetimePredictor, key: BlockKey, time_s: float, within_s: float) -> float:
    """The probability that the block is found again within this time, to 1/64: the highest quantile whose lifetime fits in,
    times that of a return at all where the predictor can tell it. 0 to 1."""
    low, high = 0.0, 1.0
    for _ in range(6):
        middle = (low + high) / 2
        if predictor.predict_ttl(key, time_s, middle) <= within_s:
            low = middle
        else:
            high = middle
    returns = predictor.predict_return(key) if isinstance(predictor, GapPredictor) else 1.0
    return (low + high) / 2 * returns


class Calibration(NamedTuple):
    """How often gaps ended within the predicted lifetime.

    Attributes:
        shares: for each of the quantiles .1 to .9 the share of gaps that did; the quantile itself where predictions are right.
        error: mean over the quantiles of |share - quantile|.
        median_ratio: median over the gaps of max(gap / predicted, predicted / gap) for the median prediction; at least 1.
        num_gaps: what this rests on.
    """

    shares: tuple[float, ...]
    error: float
    median_ratio: float
    num_gaps: int


def calibrate(predictor: LifetimePredictor, trace: Iterable[tuple[float, int]], *, warm_up: int = 1000) -> Calibration:
    """Run a trace of (time_s, key) through a fresh predictor; each gap is held against what was predicted when it began.

    `warm_up`: accesses at the start whose predictions do not count. Raises PolicyError: no gap to score.
    """
    begun: dict[int, tuple[float, tuple[float, ...]]] = {}
    within = np.zeros(len(QUANTILES))
    log_ratios: list[float] = []
    for place, (time_s, number) in enumerate(trace):
        key = BlockKey(number)
        if key in begun:
            start_s, lifetimes = begun.pop(key)
            gap_s = time_s - start_s
            within += [gap_s <= lifetime for lifetime in lifetimes]
            log_ratios.append(abs(math.log(max(gap_s, SHORTEST_GAP_S) / lifetimes[len(lifetimes) // 2])))
        predictor.observe(key, time_s)
        if place >= warm_up:
            begun[key] = (time_s, tuple(predictor.predict_ttl(key, time_s, quantile) for quantile in QUANTILES))
    if not log_ratios:
        raise PolicyError(
            f"the trace has no block that comes back after the first {warm_up} accesses; give a longer one."
        )
    shares = within / len(log_ratios)
    error = float(np.abs(shares - QUANTILES).mean())
    return Calibration(tuple(shares.tolist()), error, math.exp(float(np.median(log_ratios))), len(log_ratios))


def calibration_error(
    predictor: LifetimePredictor, trace: Iterable[tuple[float, int]], *, warm_up: int = 1000
) -> float:
    """`calibrate(...).error`: 0 is perfect, .5 is the worst."""
    return calibrate(predictor, trace, warm_up=warm_up).error
