"""The blocks whose keys, in 2 bits a number, fit the queries best.

Keys of a full block are kept a second time, each number as one of four levels between the smallest and the largest one of its
block, as KIVI (Liu et al. 2024, arXiv:2402.02750) stores them. Choosing by keys of few bits: Twilight (Lin et al. 2025,
arXiv:2502.02770). The codes take an eighth of the keys' bytes in 16 bits. The bounds of blocks come on top.
"""

from sagellm.accel.sparsity.base import TopBlocks

__all__ = ["Sketch"]


class Sketch(TopBlocks):
    """Options: those of `TopBlocks`."""

    name = "sketch"
    weights = "codes"
