"""The blocks that get the most attention, known by reading all keys: what a policy of the same budget can reach at best."""

from sagellm.accel.sparsity.base import TopBlocks

__all__ = ["Oracle"]


class Oracle(TopBlocks):
    """Options: those of `TopBlocks`."""

    name = "oracle"
    weights = "exact"
