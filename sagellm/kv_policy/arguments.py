"""Checks of what a policy gets: options, and keys that must or must not be on its tier."""

import math
from collections.abc import Container
from numbers import Integral, Real

from sagellm.core.errors import PolicyError
from sagellm.core.options import option_checks
from sagellm.kv_policy.base import BlockKey, CachedBlock

__all__ = ["RANGES", "check_count", "check_number", "check_option", "require_absent", "require_new", "require_present"]

check_number, check_count = option_checks("policy", PolicyError)

MAX_DEPTH = 2**31 - 1

# Inclusive ranges of all options; the policies in C++ check them too.
RANGES = {
    "small_ratio": (0.0, 1.0),
    "ghost_ratio": (0.0, 16.0),
    "move_to_main": (1, 10**6),
    "in_ratio": (0.0, 1.0),
    "out_ratio": (0.0, 16.0),
    "protected_ratio": (0.0, 1.0),
    "window_ratio": (0.0, 1.0),
    "half_life": (1e-9, 1e18),
    "depth_weight": (0.0, 1e9),
}


def check_option(policy: str, option: str, value: object) -> float:
    """Return the value of an option of `RANGES`. Raises PolicyError if it is not a number in its range."""
    return check_number(policy, option, value, *RANGES[option])


def require_new(block: CachedBlock, *holders: Container[BlockKey]) -> None:
    """Raise PolicyError if it is not a valid `CachedBlock`, or one of the holders has it."""
    for what, key in (("key", block.key), ("parent", block.parent)):
        if not (isinstance(key, Integral) and 0 <= key < 2**64) and not (what == "parent" and key is None):
            raise PolicyError(f"{what} {key!r}; it must be a whole number from 0 to 2**64 - 1.")
    if block.parent == block.key:
        raise PolicyError(f"block {block.key} is its own parent.")
    if not (isinstance(block.depth, Integral) and 1 <= block.depth <= MAX_DEPTH):
        raise PolicyError(f"block {block.key}: depth {block.depth!r}; allowed are 1 to {MAX_DEPTH}.")
    for what, number in (("size_bytes", block.size_bytes), ("cost_s", block.cost_s)):
        if not (isinstance(number, Real) and math.isfinite(number)):
            raise PolicyError(f"{what} {number!r}; it must be a finite number.")
    require_absent(block.key, *holders)


def require_absent(key: BlockKey, *holders: Container[BlockKey]) -> None:
    """Raise PolicyError if one of the holders has the block."""
    if any(key in holder for holder in holders):
        raise PolicyError(f"block {key} is on the tier already; tell on_remove before it is inserted again.")


def require_present(key: BlockKey, *holders: Container[BlockKey]) -> None:
    """Raise PolicyError if no holder has the block."""
    try:
        is_present = any(key in holder for holder in holders)
    except TypeError:  # it cannot be hashed
        is_present = False
    if not is_present:
        raise PolicyError(f"block {key} is not on the tier; tell on_insert first.")
