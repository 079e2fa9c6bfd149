"""Prompts read the blocks whose antidiagonals get the most attention. Decode steps read everything.

Source: XAttention (Xu et al. 2025, arXiv:2503.16428). The query heads that share a key head choose together, for the tokens of
a tile, by the sum of their softmax over strips of keys.
"""

from sagellm.accel.sparsity.base import SparsePolicy

__all__ = ["XAttention"]


class XAttention(SparsePolicy):
    """Options: `threshold`, `stride`, `whole_layers`, and those of `SparsePolicy`.

    Args:
        share: part of the blocks up to a tile's own that it reads at most.
        threshold: part of the estimated attention weight that it reads, above 0 and at most 1.
        stride: tokens of a strip, which must divide the block size. An estimate costs 1 / stride of the products of attention.
        whole_layers: so many layers, the first ones, read all blocks.
    """

    name = "xattention"
    prompt_weights = "strips"

    def __init__(
        self, share: float = 0.5, min_blocks: int = 4, first: int = 1, last: int = 1, threshold: float = 0.95,
        stride: int = 16, whole_layers: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(share, min_blocks, first, last)
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold is {threshold}; give more than 0 and at most 1")
        for name, number, least in (("stride", stride, 1), ("whole_layers", whole_layers, 0)):
            if type(number) is not int or number < least:
                raise ValueError(f"{name} is {number!r}; give a whole number, {least} or more")
        self.threshold, self.stride, self.whole_layers = threshold, stride, whole_layers
