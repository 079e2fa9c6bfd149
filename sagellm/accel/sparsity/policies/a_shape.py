"""Prompts read their first blocks and the latest ones. Decode steps read everything.

Source: the A-shape heads of MInference (Jiang et al. 2024, arXiv:2407.02490), here for all heads.
"""

import numpy as np

from sagellm.accel.sparsity.base import PromptView, SparsePolicy, both_ends

__all__ = ["AShape"]


class AShape(SparsePolicy):
    """Options: see `SparsePolicy`. `first` is the number of blocks of attention sinks."""

    name = "a_shape"

    def select_prompt_blocks(self, view: PromptView) -> list[np.ndarray]:
        pairs = zip(view.keep.tolist(), view.before.tolist(), strict=True)
        return [both_ends(self.first, keep, before) for keep, before in pairs]
