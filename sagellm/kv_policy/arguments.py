"""Checks what a policy is given: its options, and keys that must or must not be on the tier."""

import math
from collections.abc import Container

from sagellm.core.errors import PolicyError
from sagellm.kv_policy.base import BlockKey

__all__ = ["check_count", "check_number", "require_absent", "require_present"]


def check_number(policy: str, option: str, value: object, low: float, high: float = math.inf) -> float:
    """The value as a float. Raises PolicyError: not a finite number from `low` to `high`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or not low <= value <= high
    ):
        bounds = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise PolicyError(f"policy {policy}: option {option}={value!r}; give a number {bounds}.")
    return float(value)


def check_count(policy: str, option: str, value: object, low: int = 0) -> int:
    """The value as an int. Raises PolicyError: not a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise PolicyError(f"policy {policy}: option {option}={value!r}; give a whole number of at least {low}.")
    return value


def require_absent(key: BlockKey, *holders: Container[BlockKey]) -> None:
    """Raises PolicyError: one of the holders has the block."""
    if any(key in holder for holder in holders):
        raise PolicyError(f"block {key} is on the tier already; tell on_remove before it is inserted again.")


def require_present(key: BlockKey, *holders: Container[BlockKey]) -> None:
    """Raises PolicyError: no holder has the block."""
    if not any(key in holder for holder in holders):
        raise PolicyError(f"block {key} is not on the tier; tell on_insert first.")
