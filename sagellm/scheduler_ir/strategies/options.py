"""Checks the options of a strategy."""

import math
from numbers import Real

from sagellm.core.errors import PlanError

__all__ = ["check_count", "check_number"]


def check_number(strategy: str, option: str, value: object, low: float, high: float = math.inf) -> float:
    """The value as a float. Raises PlanError: not a finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not (math.isfinite(value) and low <= value <= high):
        bounds = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise PlanError(f"strategy {strategy}: option {option}={value!r}; give a number {bounds}.")
    return float(value)


def check_count(strategy: str, option: str, value: object, low: int, high: float = math.inf) -> int:
    """The value as an int. Raises PlanError: not a whole number from `low` to `high`."""
    number = check_number(strategy, option, value, low, high)
    if number != int(number):
        raise PlanError(f"strategy {strategy}: option {option}={value!r}; give a whole number.")
    return int(number)
