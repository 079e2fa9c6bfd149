"""Blocks by chance, besides those at both ends: what any policy must beat."""

import numpy as np

from sagellm.accel.sparsity.base import SparsePolicy, SparseView, top_blocks

__all__ = ["Random"]


class Random(SparsePolicy):
    """Options: `seed`, and those of `SparsePolicy`."""

    name = "random"

    def __init__(self, share: float = 0.25, min_blocks: int = 4, first: int = 1, last: int = 1, seed: int = 0) -> None:
        super().__init__(share, min_blocks, first, last)
        self._seed = seed

    def select_blocks(self, view: SparseView) -> list[np.ndarray]:
        chance = np.random.default_rng([self._seed, view.step])
        return [
            top_blocks(chance.random(blocks), keep, self.first, self.last)
            for blocks, keep in zip(view.num_blocks.tolist(), view.keep.tolist(), strict=True)
        ]
