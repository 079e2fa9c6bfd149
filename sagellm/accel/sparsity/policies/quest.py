"""The blocks whose keys may fit the queries best, by the smallest and largest numbers of the keys in each block.

Source: Quest (Tang et al. 2024, arXiv:2406.10774). There each query head chooses; here the query heads that share a key head
choose together, by the sum of their softmax over the bounds, so that a key is read once for all of them.
"""

from sagellm.accel.sparsity.base import TopBlocks

__all__ = ["Quest"]


class Quest(TopBlocks):
    """Options: those of `TopBlocks`."""

    name = "quest"
    weights = "bounds"
