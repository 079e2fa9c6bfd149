"""Whether to compute a step in two halves, with the sums of one half under way while the other half is computed."""

import statistics
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["OverlapWindow"]

LOOKS = 8  # steps in one piece that show how long ranks wait for sums
LEAST_SHARE = 0.1  # of a step; halves hide no more than that, and cost time of their own
TRIALS = 8  # pairs of steps, one in halves and one in one piece
LEAST_GAIN = 0.03  # of a step


@dataclass
class _Sort:
    """Measurements of one sort of steps."""

    shares: list[float] = field(default_factory=list)
    share: float | None = None  # that rank 0 waited, once it is known
    whole_s: list[float] = field(default_factory=list)
    halves_s: list[float] = field(default_factory=list)
    ratio: float | None = None  # of the time in halves over the time in one piece
    pieces: int | None = None


class OverlapWindow:
    """Finds out on real steps whether halves of their rows pay, for each sort of steps.

    Splitting the tokens of a step is that of TokenWeave (Gond et al., 2025, arXiv:2505.11329). Halves read all weights twice,
    so they pay where products are limited by operations and sums by latency. `LOOKS` steps tell how long ranks wait for sums.
    If that is at least `LEAST_SHARE` of a step, `TRIALS` pairs of steps are timed, each pair in both ways. All ranks have the
    same steps in the same order, so they make the same calls. Numbers of rank 0 decide.

    Args:
        agree: returns rank 0's number on all ranks. They call it at the same time.
    """

    def __init__(self, agree: Callable[[float], float]) -> None:
        self._agree = agree
        self._sorts: dict[Hashable, _Sort] = {}

    def pieces(self, sort: Hashable) -> int:
        """Return in how many pieces the next step of a sort is computed: 1 or 2."""
        found = self._sorts.get(sort)
        if found is None:
            return 1
        if found.pieces is not None:
            return found.pieces
        return 1 if found.share is None or len(found.halves_s) > len(found.whole_s) else 2

    def is_open(self, sort: Hashable) -> bool:
        """Return True until it is decided about a sort. Its steps are to be noted so long."""
        found = self._sorts.get(sort)
        return found is None or found.pieces is None

    def note(self, sort: Hashable, pieces: int, seconds: float, waited_s: float) -> None:
        """Take the time of a step of a sort that `is_open`.

        Args:
            pieces: as `pieces` has answered.
            seconds: of the step; where steps of a sort differ in size, by token.
            waited_s: of `seconds`, in which nothing was computed.
        """
        found = self._sorts.setdefault(sort, _Sort())
        if found.share is None:
            found.shares.append(waited_s / seconds)
            if len(found.shares) == LOOKS:
                found.share = self._agree(statistics.median(found.shares))
                if found.share < LEAST_SHARE:
                    found.pieces = 1
            return
        (found.halves_s if pieces == 2 else found.whole_s).append(seconds)
        if len(found.whole_s) == TRIALS:
            pairs = zip(found.halves_s, found.whole_s, strict=True)
            found.ratio = self._agree(statistics.median(halves / whole for halves, whole in pairs))
            found.pieces = 2 if found.ratio <= 1 - LEAST_GAIN else 1

    def report(self) -> list[dict[str, Any]]:
        """Return what was measured and decided, fit for JSON; None for what is not known yet, or needs not be."""
        return [
            {"sort": sort, "share": found.share, "halves_over_whole": found.ratio, "pieces": found.pieces}
            for sort, found in list(self._sorts.items())
        ]
