"""Gives up the blocks of a prompt that its last queries look at least. Generated tokens stay.

Source: SnapKV (Li et al. 2024, arXiv:2404.14469). There each head keeps tokens of its own. Here a block is given up in all
layers and heads, since that is what frees memory of a paged cache. Its worth is the sum of the weights that they give to it.
"""

import numpy as np

from sagellm.accel.sparsity.base import DropView, SparsePolicy

__all__ = ["SnapKV"]


class SnapKV(SparsePolicy):
    """Options: `observed`, and those of `SparsePolicy`.

    Args:
        share: part of a prompt's blocks to keep.
        observed: last tokens of the prompt whose queries decide.
    """

    name = "snapkv"

    def __init__(
        self, share: float = 0.25, min_blocks: int = 4, first: int = 1, last: int = 2, observed: int = 32
    ) -> None:
        super().__init__(share, min_blocks, first, last)
        if type(observed) is not int or observed < 1:
            raise ValueError(f"observed is {observed!r}; give a whole number, 1 or more")
        self.observed = observed

    def drop_blocks(self, view: DropView) -> list[np.ndarray]:
        return view.least()
