"""The contract of sparse policies: their view of a step, and their answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

__all__ = ["PER", "WEIGHTS", "SparsePolicy", "SparseView", "TopBlocks", "top_blocks", "wrong_with"]

PER = ("step", "layer", "head")
WEIGHTS = ("", "bounds", "exact")
_NONE = np.empty(0, np.float32)


@dataclass(frozen=True)
class SparseView:
    """A decode step as a policy sees it.

    Sequences are in the order of the step. Positions of blocks count from 0 in each sequence.

    Attributes:
        step: number of the decode step, from 0.
        layer: number of the layer; -1 for a policy that chooses once a step.
        block_size: tokens of a block.
        lengths: int64 [sequences], tokens with the new one.
        keep: int64 [sequences], blocks to choose, by `SparsePolicy.budget`.
        queries: float32 [sequences, heads, head_size], after the rotary embedding. Empty if the policy chooses once a step.
        weights: float32 [sequences, kv_heads, blocks]: attention weight that the queries of a key head give to each block,
            added up; estimated or exact, as `SparsePolicy.weights` asks. Beyond the blocks of a sequence they are 0.
        first, last: blocks at each end of a sequence that the policy always reads.
        by_head: whether each key head has a choice of its own.
    """

    step: int
    layer: int
    block_size: int
    lengths: np.ndarray
    keep: np.ndarray
    queries: np.ndarray = field(default_factory=lambda: _NONE)
    weights: np.ndarray = field(default_factory=lambda: _NONE)
    first: int = 1
    last: int = 1
    by_head: bool = False

    @property
    def num_blocks(self) -> np.ndarray:
        """Blocks of each sequence, int64 [sequences]."""
        return -(-self.lengths // self.block_size)

    def top(self) -> list[np.ndarray]:
        """Return the blocks with the most weight, and those at both ends. The engine does it natively where it can."""
        found = []
        for weights, blocks, keep in zip(self.weights, self.num_blocks.tolist(), self.keep.tolist(), strict=True):
            rows = weights[:, :blocks] if self.by_head else weights[:, :blocks].sum(0, keepdims=True)
            chosen = [top_blocks(row, keep, self.first, self.last) for row in rows]
            found.append(np.stack(chosen) if self.by_head else chosen[0])
        return found


def top_blocks(weights: np.ndarray, keep: int, first: int = 1, last: int = 1) -> np.ndarray:
    """Return rising positions of `keep` blocks: the last ones, the first ones, then those of most weight, later ones first.

    Args:
        weights: float [blocks].
    """
    blocks = len(weights)
    worth = weights.astype(np.float64)
    worth[:first] = 1e30
    worth[max(0, blocks - max(1, last)) :] = 2e30
    order = np.lexsort((-np.arange(blocks), -worth))
    return np.sort(order[:keep])


class SparsePolicy:
    """Chooses which KV blocks the attention of a decode step reads. Prompts read all of theirs.

    A subclass sets `name` and defines `select_blocks`. The blocks stay in the cache, and another step may read them.

    Args:
        share: part of a sequence's blocks to read, above 0 and at most 1.
        min_blocks: sequences of at most so many blocks are read whole, and so many are read of longer ones at least.
        first, last: blocks at each end of a sequence that are always read.

    Raises:
        ValueError: an option out of its range.
    """

    name: ClassVar[str] = ""
    # One choice for all layers, one for each layer, or one for each key head of each layer.
    per: Literal["step", "layer", "head"] = "step"
    weights: Literal["", "bounds", "exact"] = ""  # what `SparseView.weights` holds; not with `per` step
    # With bounds: how much of the way from the middle of a block's bounds to the largest possible product its estimate goes.
    reach: float = 1.0
    whole_layers: int = 0  # so many layers, the first ones, read all blocks; not with `per` step

    def __init__(self, share: float = 0.25, min_blocks: int = 4, first: int = 1, last: int = 1) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; give more than 0 and at most 1")
        if min(first, last - 1, min_blocks - first - last) < 0:
            raise ValueError(
                f"first {first}, last {last} and min_blocks {min_blocks}: give first at least 0, last at least 1, and "
                "min_blocks at least their sum"
            )
        self.share, self.min_blocks, self.first, self.last = share, min_blocks, first, last

    def budget(self, num_blocks: int) -> int:
        """Return how many of a sequence's blocks to read."""
        return min(num_blocks, max(self.min_blocks, round(self.share * num_blocks)))

    def select_blocks(self, view: SparseView) -> Sequence[np.ndarray]:
        """Return positions of the blocks to read, rising, for each sequence.

        They are int64 [keep], or [kv_heads, keep] with `per` head. The last block of a sequence, which takes the new token,
        must be the last one. Called once a step, or once for each layer of a step.
        """
        raise NotImplementedError


class TopBlocks(SparsePolicy):
    """Chooses the blocks with the most weight. While a subclass leaves `select_blocks` as it is, no Python runs in a step.

    Args:
        by_head: whether each key head chooses, or all heads of a layer together.
        whole_layers: so many layers, the first ones, read all blocks.
    """

    def __init__(
        self, share: float = 0.25, min_blocks: int = 4, first: int = 1, last: int = 1, by_head: bool = True,
        whole_layers: int = 2,
    ) -> None:  # fmt: skip
        super().__init__(share, min_blocks, first, last)
        if type(whole_layers) is not int or whole_layers < 0:
            raise ValueError(f"whole_layers is {whole_layers!r}; give a whole number, 0 or more")
        self.whole_layers = whole_layers
        self.per = "head" if by_head else "layer"

    def select_blocks(self, view: SparseView) -> list[np.ndarray]:
        return view.top()


def wrong_with(chosen: Sequence[np.ndarray], view: SparseView, kv_heads: int = 1) -> str:
    """Return what is wrong with a choice, or nothing."""
    if len(chosen) != len(view.lengths):
        return f"it chose for {len(chosen)} sequences; the step has {len(view.lengths)}"
    for number, (given, keep, blocks) in enumerate(
        zip(chosen, view.keep.tolist(), view.num_blocks.tolist(), strict=True)
    ):
        positions = np.asarray(given)
        shape = (kv_heads, keep) if view.by_head else (keep,)
        if positions.shape != shape or positions.dtype.kind not in "iu":
            return f"sequence {number}: it chose {positions.dtype} {list(positions.shape)}; give whole numbers {list(shape)}"
        if keep and (positions.min() < 0 or positions.max() >= blocks):
            return f"sequence {number}: it chose blocks {positions.min()} to {positions.max()}; there are 0 to {blocks - 1}"
        if (np.diff(positions) <= 0).any():
            return f"sequence {number}: positions do not rise"
        if (positions[..., -1] != blocks - 1).any():
            return f"sequence {number}: the last block, {blocks - 1}, is missing"
    return ""
