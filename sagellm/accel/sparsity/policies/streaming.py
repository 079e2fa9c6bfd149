"""The first blocks and the latest ones.

Source: StreamingLLM (Xiao et al. 2024, arXiv:2309.17453). Keys keep the positions of the text, not those of the window.
"""

import numpy as np

from sagellm.accel.sparsity.base import SparsePolicy, SparseView

__all__ = ["Streaming"]


class Streaming(SparsePolicy):
    """Options: see `SparsePolicy`. `first` is the number of blocks of attention sinks."""

    name = "streaming"

    def select_blocks(self, view: SparseView) -> list[np.ndarray]:
        return [
            np.r_[:sinks, blocks - keep + sinks : blocks]
            for blocks, keep in zip(view.num_blocks.tolist(), view.keep.tolist(), strict=True)
            for sinks in (min(self.first, keep - 1),)
        ]
