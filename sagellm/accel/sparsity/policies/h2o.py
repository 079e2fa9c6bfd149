"""Gives up the blocks that got the least attention so far, after every step.

Source: H2O (Zhang et al. 2023, arXiv:2306.14048). There each head keeps tokens of its own, and all queries of the prompt count.
Here a block is given up in all layers and heads, and the last queries of each step of a prompt count, with every decoded token.
"""

from sagellm.accel.sparsity.policies.snapkv import SnapKV

__all__ = ["H2O"]


class H2O(SnapKV):
    """Options: those of `SnapKV`. `last` is the number of recent blocks that stay."""

    name = "h2o"
    drops_after = "step"
