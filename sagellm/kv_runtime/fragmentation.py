"""Fragmentation of a pool: how scattered its free slots are."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["fragmentation", "free_runs"]


def free_runs(free: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first slots, lengths) of the runs of free slots, in slot order. O(n).

    Args:
        free: bool [n], True where a slot is free.
    """
    edges = np.flatnonzero(np.diff(free.astype(np.int8), prepend=0, append=0))
    return edges[::2], edges[1::2] - edges[::2]


def fragmentation(free: NDArray[np.bool_]) -> float:
    """Return 1 - largest free run / free slots: 0 if the free slots lie together or none is free, towards 1 if scattered."""
    lengths = free_runs(free)[1]
    return 1.0 - float(lengths.max() / lengths.sum()) if len(lengths) else 0.0
