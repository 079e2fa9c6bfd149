"""Fragmentation of a pool: how scattered its free slots are, and which few blocks to move to mend it.

A move costs the bytes of a block; what it buys is a longer run of free slots. So a compaction is judged by its gain: by how
many slots the largest free run grows for each block moved.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Compaction", "fragmentation", "free_runs", "plan_compaction"]

NUM_LENGTHS = 16  # run lengths that are tried where no length is asked for


class Compaction(NamedTuple):
    """Moves that lengthen the largest free run; none where it is not worth it.

    Attributes:
        moves: (from slot, to slot), each from a used slot to a free one, in any order; owners rename by them.
        largest_before, largest_after: slots of the largest free run.
    """

    moves: tuple[tuple[int, int], ...]
    largest_before: int
    largest_after: int

    @property
    def gain(self) -> float:
        """Slots that the largest free run grows for each block moved; 0 where none is."""
        return (self.largest_after - self.largest_before) / len(self.moves) if self.moves else 0.0


def free_runs(free: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(first slots, lengths) of the runs of free slots, in slot order. O(n).

    Args:
        free: bool [n], True where a slot is free.
    """
    edges = np.flatnonzero(np.diff(free.astype(np.int8), prepend=0, append=0))
    return edges[::2], edges[1::2] - edges[::2]


def fragmentation(free: NDArray[np.bool_]) -> float:
    """1 - largest free run / free slots: 0 where the free slots lie together, or none is free; towards 1 the more scattered."""
    lengths = free_runs(free)[1]
    return 1.0 - float(lengths.max() / lengths.sum()) if len(lengths) else 0.0


def plan_compaction(
    free: NDArray[np.bool_],
    *,
    wanted: int | None = None,
    min_gain: float = 1.0,
    fixed: NDArray[np.bool_] | None = None,
) -> Compaction:
    """The moves that empty one window of slots at the least cost, if they gain enough.

    Args:
        free: bool [n], True where a slot is free.
        wanted: slots that must lie together; None for the length whose gain is best.
        min_gain: slots that the largest run must grow for each block moved.
        fixed: bool [n], True where the block in the slot must not move.

    O(n) for each length tried, of which there are at most `NUM_LENGTHS`.
    """
    num_free = int(np.count_nonzero(free))
    largest = int(free_runs(free)[1].max(initial=0))
    if wanted is None:
        lengths = np.unique(np.geomspace(largest + 1, num_free, NUM_LENGTHS).astype(int)) if num_free > largest else []
    else:
        lengths = [wanted] if largest < wanted <= num_free else []
    best = Compaction((), largest, largest)
    for length in lengths:
        plan = _empty_window(free, int(length), largest, fixed)
        if plan.moves and plan.gain >= min_gain and plan.gain > best.gain:
            best = plan
    return best


def _empty_window(free: NDArray[np.bool_], length: int, largest: int, fixed: NDArray[np.bool_] | None) -> Compaction:
    """Moves that empty the window of `length` slots that holds the fewest blocks; none where every window holds a fixed one."""
    used = ~free
    cost = _window_sums(used, length)
    if fixed is not None:
        cost = np.where(_window_sums(used & fixed, length) > 0, len(free) + 1, cost)
    first = int(np.argmin(cost))
    if cost[first] > len(free):
        return Compaction((), largest, largest)
    window = slice(first, first + length)
    sources = first + np.flatnonzero(used[window])
    # No window is longer than there are free slots, so outside there are at least as many free as used inside. The smallest
    # holes are filled first: they are of least use to anybody.
    outside = free.copy()
    outside[window] = False
    firsts, lengths = free_runs(outside)
    order = np.argsort(lengths, kind="stable")
    holes = (
        np.concatenate([np.arange(firsts[run], firsts[run] + lengths[run]) for run in order]) if len(order) else firsts
    )
    targets = holes[: len(sources)]
    after = free.copy()
    after[sources], after[targets] = True, False
    moves = tuple(zip(sources.tolist(), targets.tolist(), strict=True))
    return Compaction(moves, largest, int(free_runs(after)[1].max()))


def _window_sums(flags: NDArray[np.bool_], length: int) -> NDArray[np.int64]:
    """int64 [n - length + 1]: how many are set in each window."""
    sums = np.concatenate(([0], np.cumsum(flags)))
    return sums[length:] - sums[:-length]
