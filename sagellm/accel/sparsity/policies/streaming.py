"""The first blocks and the latest ones.

Source: StreamingLLM (Xiao et al. 2024, arXiv:2309.17453). Keys keep the positions of the text, not those of the window.
"""

import numpy as np

from sagellm.accel.sparsity.base import SparsePolicy, SparseView, both_ends

__all__ = ["Streaming"]


class Streaming(SparsePolicy):
    """Options: see `SparsePolicy`. `first` is the number of blocks of attention sinks."""

    name = "streaming"

    def select_blocks(self, view: SparseView) -> list[np.ndarray]:
        pairs = zip(view.keep.tolist(), view.num_blocks.tolist(), strict=True)
        # The last block takes the new token: it is read before any of the first ones.
        return [both_ends(min(self.first, keep - 1), keep, blocks) for keep, blocks in pairs]
