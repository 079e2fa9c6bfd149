"""What a strategy is told at its start, checked."""

import math
from typing import Any

from sagellm.core.errors import SpeculationError

__all__ = ["fraction", "whole_number"]


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    """Raises SpeculationError: no whole number, or not from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise SpeculationError(f"{name} is {value!r}; give a whole number from {low} to {high}.")
    return value


def fraction(name: str, value: Any) -> float:
    """Raises SpeculationError: no number, or not from 0 to 1."""
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value <= 1:
        raise SpeculationError(f"{name} is {value!r}; give a number from 0 to 1.")
    return float(value)
