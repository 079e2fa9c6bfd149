"""How fast the machine of a log was at each moment, beside its average: others use it too, and clocks and heat change.

A queue that is nearly full remembers: when steps take a tenth longer for some seconds, first tokens come late for as long as it
takes to catch up. Costs of steps are fitted over the whole log; this is the residual.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from sagellm.core.hooks import Phase
from sagellm.scheduler_ir.simulation.base import StepCosts, StepRun

__all__ = ["DriftingCosts", "drift_of"]

NEAR_S = 0.5  # steps that end so much before or after a moment say how fast the machine was then


@dataclass(frozen=True, slots=True)
class DriftingCosts:
    """`costs` times `factors[k]` from `times_s[k - 1]` to `times_s[k]`, which ascend; 1 after the last."""

    costs: StepCosts
    times_s: Sequence[float] = field(repr=False)
    factors: Sequence[float] = field(repr=False)

    def seconds(self, phase: Phase, num_requests: int, num_tokens: int, attention: float, now_s: float) -> float:
        place = bisect_left(self.times_s, now_s)
        factor = self.factors[place] if place < len(self.factors) else 1.0
        return factor * self.costs.seconds(phase, num_requests, num_tokens, attention, now_s)


def drift_of(costs: StepCosts, steps: Sequence[StepRun], near_s: float = NEAR_S) -> DriftingCosts:
    """`steps`: of the log that `costs` were fitted on, in order. O(steps)."""
    timed = [step for step in steps if step.seconds > 0]
    fitted = [costs.seconds(each.phase, each.num_requests, each.num_tokens, each.attention, each.end_s) for each in timed]
    ends = [step.end_s for step in timed]
    measured = _sums([step.seconds for step in timed])
    predicted = _sums(fitted)
    factors = []
    for end_s in ends:
        first, last = bisect_left(ends, end_s - near_s), bisect_left(ends, end_s + near_s)
        of_these = predicted(first, max(last, first + 1))
        factors.append(measured(first, max(last, first + 1)) / of_these if of_these > 0 else 1.0)
    return DriftingCosts(costs, ends, factors)


def _sums(values: Sequence[float]) -> Callable[[int, int], float]:
    total = [0.0, *accumulate(values)]
    return lambda first, last: total[last] - total[first]
