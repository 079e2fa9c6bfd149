"""The cores of this process, split over the engines of a group."""

import os
from collections.abc import Sequence
from itertools import pairwise

from sagellm.core.errors import ConfigError

__all__ = ["available_cores", "split_cores"]


def available_cores() -> list[int]:
    """Cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def split_cores(cores: Sequence[int], num: int) -> list[list[int]]:
    """`num` shares of neighbours, whose sizes differ by one at most; the first ones are the larger ones.

    Raises:
        ConfigError: fewer cores than shares.
    """
    if len(cores) < num:
        raise ConfigError(f"--pin: {num} engines for {len(cores)} cores; start fewer engines, or leave --pin out.")
    size, rest = divmod(len(cores), num)
    starts = [number * size + min(number, rest) for number in range(num + 1)]
    return [list(cores[first:last]) for first, last in pairwise(starts)]
