"""The blocks whose keys may fit the queries best, by the smallest and largest numbers of the keys in each block.

Source: Quest (Tang et al. 2024, arXiv:2406.10774). There each query head chooses; here the query heads that share a key head
choose together, by the sum of their softmax over the bounds, so that a key is read once for all of them.
"""

from sagellm.accel.sparsity.base import TopBlocks

__all__ = ["Quest"]


class Quest(TopBlocks):
    """Options: `reach`, and those of `TopBlocks`.

    Args:
        reach: how much of the way a block's estimate goes from the middle of its bounds to the largest product that a key
            inside of them can have; 1 is the paper's bound.
    """

    name = "quest"
    weights = "bounds"

    def __init__(
        self, share: float = 0.25, min_blocks: int = 4, first: int = 1, last: int = 1, by_head: bool = True,
        whole_layers: int = 2, reach: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(share, min_blocks, first, last, by_head, whole_layers)
        if not 0 <= reach <= 1:
            raise ValueError(f"reach is {reach}; give 0 to 1")
        self.reach = reach
