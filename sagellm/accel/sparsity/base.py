"""The contract of sparse policies: their views of a step, and their answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

__all__ = [
    "DROPS_AFTER", "KEY_SUM_UNIT", "PER", "PROMPT_WEIGHTS", "SUMMARIES", "WEIGHTS", "DropView", "PromptView",
    "SparsePolicy", "SparseView", "TopBlocks",
    "as_ranges", "both_ends", "prompt_view", "step_view", "top_blocks", "wrong_kind", "wrong_with", "wrong_with_drops",
    "wrong_with_prompts",
]  # fmt: skip

PER = ("step", "layer", "head")
WEIGHTS = ("", "bounds", "spread", "codes", "exact")
SUMMARIES = ("bounds", "means")
WANTED = {"bounds": {"bounds"}, "spread": {"bounds", "means"}, "codes": {"bounds", "codes"}}  # summaries, by weights
KEY_SUM_UNIT = 2.0**-12  # of the native step's sums of keys
PROMPT_WEIGHTS = ("", "strips")
DROPS_AFTER = ("prompt", "step")
_NONE = np.empty(0, np.float32)
_NO_BLOCKS = np.empty((0, 0), np.int64)


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
        tables: int64 [sequences, width], blocks of the cache that hold each sequence.
        bounds: float32 [cache blocks, kv_heads, 2, head_size], smallest and largest numbers of the keys of each block of the
            cache in this layer. Empty if no policy asks for them, as with `SparsePolicy.summaries`.
        key_sums: int32 [cache blocks, kv_heads, head_size], sums of these keys in units of `KEY_SUM_UNIT`. `mean_keys`
            divides them.
        first, last: blocks at each end of a sequence that the policy always reads.
        by_head: whether each key head has a choice of its own.
    """

    step: int
    layer: int
    block_size: int
    lengths: np.ndarray
    keep: np.ndarray
    tables: np.ndarray = field(default_factory=lambda: _NO_BLOCKS)
    queries: np.ndarray = field(default_factory=lambda: _NONE)
    weights: np.ndarray = field(default_factory=lambda: _NONE)
    bounds: np.ndarray = field(default_factory=lambda: _NONE)
    key_sums: np.ndarray = field(default_factory=lambda: _NONE)
    first: int = 1
    last: int = 1
    by_head: bool = False

    def key_bounds(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the smallest and the largest numbers of the keys of a sequence's blocks.

        Both are float32 [blocks, kv_heads, head_size].
        """
        found = self.bounds[self._blocks(sequence)]
        return found[:, :, 0], found[:, :, 1]

    def mean_keys(self, sequence: int) -> np.ndarray:
        """Return the mean key of each block of a sequence, float32 [blocks, kv_heads, head_size]."""
        blocks = self._blocks(sequence)
        counts = np.full(len(blocks), self.block_size)
        counts[-1] = (self.lengths[sequence] - 1) % self.block_size + 1
        return (self.key_sums[blocks] * (KEY_SUM_UNIT / counts[:, None, None])).astype(np.float32)

    def _blocks(self, sequence: int) -> np.ndarray:
        return self.tables[sequence, : self.num_blocks[sequence]]

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


@dataclass(frozen=True)
class PromptView:
    """A step of prompts as a policy sees it. Adjacent tokens of a prompt are computed together, in tiles.

    A tile reads the blocks of its own tokens. The policy chooses among the blocks before those.

    Attributes:
        step: number of the step of prompts, from 0.
        block_size: tokens of a block.
        sequences: int64 [tiles], number of the tile's sequence in the step.
        before: int64 [tiles], blocks before the tile's own. Their positions are 0 to `before` - 1.
        blocks: int64 [tiles], blocks up to the tile's last token.
        keep: int64 [tiles], blocks to choose, by `SparsePolicy.budget`.
    """

    step: int
    block_size: int
    sequences: np.ndarray
    before: np.ndarray
    blocks: np.ndarray
    keep: np.ndarray


@dataclass(frozen=True)
class DropView:
    """Sequences after a step, as a policy that gives up blocks sees them. All arrays are lists of one for each sequence.

    Attributes:
        block_size: tokens of a block.
        lengths: int64 [sequences], tokens with keys and values, those given up included.
        positions: int64 [blocks], place in the text of each block that the sequence still has, counted in blocks, rising.
        weights: float32 [kv_heads, blocks], attention weight that the observed queries gave to each block, added up over
            layers and queries. Empty if the policy observes none.
        ages: int64 [blocks], tokens that the sequence got since the block was full.
        held: int64 [sequences], blocks at the beginning that cannot be given up: the prefix cache shares them.
        keep: int64 [sequences], blocks that should be left, by `SparsePolicy.budget` of all blocks of the text.
        first, last: blocks at each end that the policy keeps.
    """

    block_size: int
    lengths: np.ndarray
    positions: list[np.ndarray]
    weights: list[np.ndarray]
    held: np.ndarray
    keep: np.ndarray
    first: int = 1
    last: int = 1

    @property
    def ages(self) -> list[np.ndarray]:
        pairs = zip(self.positions, self.lengths.tolist(), strict=True)
        return [np.maximum(0, length - (positions + 1) * self.block_size) for positions, length in pairs]

    def least(self) -> list[np.ndarray]:
        """Return the blocks of least weight, as many as are over the budget: numbers in `positions`, rising."""
        found = []
        for number, positions in enumerate(self.positions):
            worth = self.weights[number].sum(0)
            blocks, keep = len(positions), int(self.keep[number])
            worth[: self.held[number]] = np.inf
            kept = top_blocks(worth, max(1, min(blocks, keep)), self.first, self.last)
            found.append(np.setdiff1d(np.arange(self.held[number], blocks), kept))
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


def step_view(
    policy: "SparsePolicy", step: int, lengths: np.ndarray, block_size: int, tables: np.ndarray = _NO_BLOCKS
) -> SparseView:
    """Return the view of a decode step before its queries are known.

    Args:
        lengths: [sequences], tokens with the new one.
        tables: [sequences, width], blocks of the cache.
    """
    lengths = np.asarray(lengths, np.int64)
    blocks = -(-lengths // block_size)
    keep = np.array([policy.budget(each) for each in blocks.tolist()], np.int64)
    return SparseView(
        step=step, layer=-1, block_size=block_size, lengths=lengths, keep=np.clip(keep, 1, blocks), tables=tables,
        first=policy.first, last=policy.last, by_head=policy.per == "head",
    )  # fmt: skip


def prompt_view(
    policy: "SparsePolicy", step: int, new: np.ndarray, lengths: np.ndarray, tile: int, block_size: int
) -> PromptView:
    """Return the view of a step of prompts.

    Args:
        new, lengths: [sequences], new tokens, and tokens with these.
        tile: new tokens that are computed together.
    """
    new, lengths = np.asarray(new, np.int64), np.asarray(lengths, np.int64)
    sequences = np.repeat(np.arange(len(new)), -(-new // tile))
    counts = np.bincount(sequences, minlength=len(new))
    first = (np.arange(len(sequences)) - (np.cumsum(counts) - counts)[sequences]) * tile
    begin = (lengths - new)[sequences] + first
    before, blocks = begin // block_size, -(-np.minimum(begin + tile, lengths[sequences]) // block_size)
    keep = np.array([policy.budget(each) for each in blocks.tolist()], np.int64)
    return PromptView(step, block_size, sequences, before, blocks, np.clip(keep - (blocks - before), 0, before))


def as_ranges(positions: np.ndarray) -> str:
    """Return rising positions as text, such as 0,7-9."""
    parts = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return ",".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts if len(part))


def both_ends(first: int, keep: int, blocks: int) -> np.ndarray:
    """Return the positions of `keep` of so many blocks: at most the `first` ones, and the latest ones."""
    sinks = max(0, min(first, keep))
    return np.r_[:sinks, blocks - keep + sinks : blocks]


class SparsePolicy:
    """Chooses which KV blocks attention reads, or gives blocks up.

    A subclass sets `name` and defines one or more of `select_blocks`, `select_prompt_blocks` and `drop_blocks`. The engine
    does not ask for the others: steps then read everything, and keep all blocks.

    Args:
        share: part of a sequence's blocks to read or to keep, above 0 and at most 1.
        min_blocks: sequences of at most so many blocks are read whole, and so many are read of longer ones at least.
        first, last: blocks at each end of a sequence that are always read.

    Raises:
        ValueError: an option out of its range.
    """

    name: ClassVar[str] = ""
    # One choice for all layers, one for each layer, or one for each key head of each layer.
    per: Literal["step", "layer", "head"] = "step"
    weights: Literal["", "bounds", "spread", "codes", "exact"] = ""  # what `SparseView.weights` holds; not with `per` step
    # Summaries of keys that `SparseView` holds, for policies that estimate in Python; not with `per` step.
    summaries: tuple[Literal["bounds", "means"], ...] = ()
    # With bounds: how much of the way from the middle of a block's bounds to the largest possible product its estimate goes.
    # With spread: how often the root of the summed squares of the query's products with half ranges is added to the product
    # with the mean key.
    reach: float = 1.0
    whole_layers: int = 0  # so many layers, the first ones, read all blocks; not with `per` step
    # Each key head chooses the blocks of a prompt by estimates from strips of `stride` tokens, and `select_prompt_blocks` is
    # not asked. It reads the blocks that have `threshold` of the estimated weight, at most as many as the budget allows.
    prompt_weights: Literal["", "strips"] = ""
    stride: int = 16
    threshold: float = 1.0
    # `drop_blocks` is asked once a prompt is computed, or after every step; `observed` last queries of a step are what its
    # weights are of: of the prompt, and with `step` each decoded token.
    drops_after: Literal["prompt", "step"] = "prompt"
    observed: int = 0

    def __init__(self, share: float = 0.25, min_blocks: int = 4, first: int = 1, last: int = 1) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share is {share}; give more than 0 and at most 1")
        if min(first, last - 1, min_blocks - first - last) < 0:
            raise ValueError(
                f"first {first}, last {last} and min_blocks {min_blocks}: give first at least 0, last at least 1, and "
                "min_blocks at least their sum"
            )
        self.share, self.min_blocks, self.first, self.last = share, min_blocks, first, last

    @property
    def selects(self) -> bool:
        """Whether decode steps read some of the blocks."""
        return type(self).select_blocks is not SparsePolicy.select_blocks

    @property
    def selects_prompts(self) -> bool:
        """Whether prompts read some of the blocks."""
        return bool(self.prompt_weights) or type(self).select_prompt_blocks is not SparsePolicy.select_prompt_blocks

    @property
    def wanted_summaries(self) -> set[str]:
        """Summaries of keys that the engine keeps for the policy."""
        return set(self.summaries) | WANTED.get(self.weights, set())

    @property
    def drops(self) -> bool:
        """Whether sequences give up blocks."""
        return type(self).drop_blocks is not SparsePolicy.drop_blocks

    def budget(self, num_blocks: int) -> int:
        """Return how many of a sequence's blocks to read, or to keep."""
        return min(num_blocks, max(self.min_blocks, round(self.share * num_blocks)))

    def select_blocks(self, view: SparseView) -> Sequence[np.ndarray]:
        """Return positions of the blocks that a decode step reads, rising, for each sequence.

        They are int64 [keep], or [kv_heads, keep] with `per` head. The last block of a sequence, which takes the new token,
        must be the last one. Called once a step, or once for each layer of a step.
        """
        raise NotImplementedError

    def select_prompt_blocks(self, view: PromptView) -> Sequence[np.ndarray]:
        """Return positions of the blocks before each tile that it reads in all layers, rising. Called once a step."""
        raise NotImplementedError

    def drop_blocks(self, view: DropView) -> Sequence[np.ndarray]:
        """Return the blocks that each sequence gives up: numbers in `view.positions`, rising.

        The last block, which takes the next token, and the first `held` ones stay.
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


def wrong_kind(policy: SparsePolicy) -> str:
    """Return what is wrong with the attributes of a policy, or nothing."""
    for name, allowed in (
        ("per", PER), ("weights", WEIGHTS), ("prompt_weights", PROMPT_WEIGHTS), ("drops_after", DROPS_AFTER)
    ):  # fmt: skip
        if getattr(policy, name) not in allowed:
            return f"has {name} {getattr(policy, name)!r}; give {', '.join(map(repr, allowed))}"
    if unknown := set(policy.summaries) - set(SUMMARIES):
        return f"has summaries {sorted(unknown)}; give {', '.join(map(repr, SUMMARIES))}"
    if policy.per == "step" and policy.summaries:
        return f"has per 'step' and summaries {policy.summaries}; give per 'layer' or 'head', or no summaries"
    if policy.per == "step" and policy.weights:
        return f"has per 'step' and weights {policy.weights!r}; give per 'layer' or 'head', or no weights"
    if not (policy.selects or policy.selects_prompts or policy.drops):
        return "defines none of select_blocks, select_prompt_blocks and drop_blocks"
    if policy.observed and not policy.drops:
        return f"observes {policy.observed} queries and gives up no blocks; define drop_blocks"
    return ""


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


def wrong_with_prompts(chosen: Sequence[np.ndarray], view: PromptView) -> str:
    """Return what is wrong with a choice for prompts, or nothing."""
    if len(chosen) != len(view.before):
        return f"it chose for {len(chosen)} tiles; the step has {len(view.before)}"
    for number, (given, before) in enumerate(zip(chosen, view.before.tolist(), strict=True)):
        if fault := _wrong_numbers(given, 0, before):
            return f"tile {number}: {fault}"
    return ""


def wrong_with_drops(chosen: Sequence[np.ndarray], view: DropView) -> str:
    """Return what is wrong with the blocks that a policy gives up, or nothing."""
    if len(chosen) != len(view.positions):
        return f"it gave up blocks of {len(chosen)} sequences; there are {len(view.positions)}"
    for number, (given, held, positions) in enumerate(zip(chosen, view.held.tolist(), view.positions, strict=True)):
        if fault := _wrong_numbers(given, held, len(positions) - 1):
            return f"sequence {number}: {fault}"
    return ""


def _wrong_numbers(given: np.ndarray, first: int, end: int) -> str:
    numbers = np.asarray(given)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        return f"it chose {numbers.dtype} {list(numbers.shape)}; give a row of whole numbers"
    if numbers.size and (numbers.min() < first or numbers.max() >= end):
        allowed = f"blocks {first} to {end - 1} may be chosen" if end > first else "no block may be chosen"
        return f"it chose blocks {numbers.min()} to {numbers.max()}; {allowed}"
    return "the blocks do not rise" if (np.diff(numbers) <= 0).any() else ""
