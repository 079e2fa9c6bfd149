"""The blocks whose keys may fit the queries best, by the smallest and largest numbers of the keys in each block.

Source: Quest (Tang et al. 2024, arXiv:2406.10774). There each query head chooses; here the query heads that share a key head
choose together, by the sum of their softmax over the estimates, so that a key is read once for all of them. The paper takes
the largest product that a key within the bounds can have. The numbers of a key are hardly ever at their worst bounds all at
once, so this says little of blocks with wide bounds. The default estimate takes them to be independent, around the mean key.
"""

from sagellm.accel.sparsity.base import TopBlocks

__all__ = ["Quest"]

LAST = 4
REACH = {"spread": 1.2, "bounds": 1.0}


class Quest(TopBlocks):
    """Options: `estimate`, `reach`, and those of `TopBlocks`.

    Args:
        last: blocks at the end that are always read; None: four, or what `min_blocks` leaves. Text depends on the tokens just
            before it, and an estimate may miss them.
        estimate: "spread", or "bounds", which is the paper's.
        reach: with "spread", how often the root of the summed squares of the query's products with half ranges is added to the
            product with the mean key (default: 1.2). With "bounds", how much of the way an estimate goes from the middle of the
            bounds to the largest product, 0 to 1 (default: 1, the paper's bound).
    """

    name = "quest"

    def __init__(
        self, share: float = 0.25, min_blocks: int = 5, first: int = 1, last: int | None = None, by_head: bool = True,
        whole_layers: int = 2, estimate: str = "spread", reach: float | None = None,
    ) -> None:  # fmt: skip
        if last is None:
            last = max(1, min(LAST, min_blocks - first))
        super().__init__(share, min_blocks, first, last, by_head, whole_layers)
        if estimate not in REACH:
            raise ValueError(f"estimate is {estimate!r}; give {' or '.join(REACH)}")
        self.weights = estimate
        self.reach = REACH[estimate] if reach is None else reach
        most = 1.0 if estimate == "bounds" else 10.0
        if not 0 <= self.reach <= most:
            raise ValueError(f"reach is {reach}; with estimate {estimate} give 0 to {most:g}")
