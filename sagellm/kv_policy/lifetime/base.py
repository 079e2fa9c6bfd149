"""Shared parts of lifetime predictors: past uses of blocks, return rates, calibration of predictions."""

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
    """Uses of a block: the last one, their number, and the gaps between them."""

    time_s: float
    num_uses: int = 1
    last_gap_s: float = 0.0  # 0: used once
    mean_log_gap: float = 0.0


class GapPredictor(LifetimePredictor):
    """Predicts the gap until the next use from gaps that were seen. `predict_ttl` speaks of blocks that are found again;
    whether one is at all, `predict_return` says. Infinity while no gap was seen, and where none was as long as the block has
    waited already.

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

    def predict_return(self, key: BlockKey, time_s: float | None = None, within_s: float = math.inf) -> float:
        """The probability that the block is found again within this time, 0 to 1.

        Without `time_s` at the moment of its last use: the share among blocks that were used as often. Afterwards the
        probability falls with its age: pi * (S(age) - S(age + within)) / (pi * S(age) + 1 - pi). S is the share of gaps longer
        than a time, among those that end.
        """
        seen = self._seen.get(key)
        uses = min(seen.num_uses, NUM_USES_APART) if seen is not None else 1
        returns = (self._num_returned[uses] + 1) / (self._num_used[uses] + 2)
        age_s = max(0.0, time_s - seen.time_s) if seen is not None and time_s is not None else 0.0
        waits = self._survival(seen, age_s)
        waits_longer = self._survival(seen, age_s + within_s) if within_s < math.inf else 0.0
        return returns * (waits - waits_longer) / (returns * waits + 1 - returns)

    @property
    def num_gaps(self) -> int:
        """How many gaps it has learned from."""
        return sum(self._num_returned)

    @abstractmethod
    def _learn(self, seen: Seen, gap_s: float) -> None:
        """A block that had been seen like this was found again after this gap."""

    @abstractmethod
    def _predict(self, seen: Seen | None, age_s: float, quantile: float) -> float:
        """Return seconds from now, `age_s` after the last use. `seen`: None for an unknown block."""

    @abstractmethod
    def _survival(self, seen: Seen | None, gap_s: float) -> float:
        """The share of gaps that are longer than this, of those that end; 1 to 0 as `gap_s` rises."""


def reuse_probability(predictor: LifetimePredictor, key: BlockKey, time_s: float, within_s: float) -> float:
    """The probability that the block is found again within this time, 0 to 1: `GapPredictor.predict_return`; of a predictor
    that has none the highest quantile whose lifetime fits in, to 1/64."""
    if isinstance(predictor, GapPredictor):
        return predictor.predict_return(key, time_s, within_s)
    low, high = 0.0, 1.0
    for _ in range(6):
        middle = (low + high) / 2
        if predictor.predict_ttl(key, time_s, middle) <= within_s:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class Calibration(NamedTuple):
    """How often gaps ended within the predicted lifetime.

    Attributes:
        shares: for each of the quantiles .1 to .9 the share of gaps that did; the quantile itself where predictions are right.
        error: mean over the quantiles of |share - quantile|.
        median_ratio: median over the gaps of max(gap / predicted, predicted / gap) for the median prediction; at least 1.
            Predictions of never do not count here; infinity if all were.
        num_gaps: what this rests on.
    """

    shares: tuple[float, ...]
    error: float
    median_ratio: float
    num_gaps: int


def calibrate(predictor: LifetimePredictor, trace: Iterable[tuple[float, int]], *, warm_up: int = 1000) -> Calibration:
    """Run a trace of (time_s, key) through a fresh predictor; each gap is held against what was predicted when it began.

    `warm_up`: accesses at the start whose predictions do not count. Raises PolicyError: no gap to score, or a time that is
    not finite or before the last one.
    """
    begun: dict[int, tuple[float, tuple[float, ...]]] = {}
    within = np.zeros(len(QUANTILES))
    log_ratios: list[float] = []
    num_gaps, last_s = 0, -math.inf
    for place, (time_s, number) in enumerate(trace):
        if not last_s <= time_s < math.inf:
            raise PolicyError(f"access {place} is at {time_s} s after {last_s} s; times are finite and never fall.")
        last_s = time_s
        key = BlockKey(number)
        if key in begun:
            start_s, lifetimes = begun.pop(key)
            gap_s = time_s - start_s
            within += [gap_s <= lifetime for lifetime in lifetimes]
            num_gaps += 1
            median_s = lifetimes[len(lifetimes) // 2]
            if median_s < math.inf:
                log_ratios.append(abs(math.log(max(gap_s, SHORTEST_GAP_S) / max(median_s, SHORTEST_GAP_S))))
        predictor.observe(key, time_s)
        if place >= warm_up:
            begun[key] = (time_s, tuple(predictor.predict_ttl(key, time_s, quantile) for quantile in QUANTILES))
    if num_gaps == 0:
        raise PolicyError(
            f"the trace has no block that comes back after the first {warm_up} accesses; give a longer one."
        )
    shares = within / num_gaps
    error = float(np.abs(shares - QUANTILES).mean())
    median_ratio = math.exp(float(np.median(log_ratios))) if log_ratios else math.inf
    return Calibration(tuple(shares.tolist()), error, median_ratio, num_gaps)


def calibration_error(
    predictor: LifetimePredictor, trace: Iterable[tuple[float, int]], *, warm_up: int = 1000
) -> float:
    """`calibrate(...).error`: 0 is perfect, .5 is the worst."""
    return calibrate(predictor, trace, warm_up=warm_up).error
