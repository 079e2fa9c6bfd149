"""A target without an engine, and the models that a strategy loads beside it: they compute next to nothing, and hold everything
that they are given against the texts that were asked about."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sagellm.accel.speculative.base import Ask

__all__ = ["BLOCK_SIZE", "VOCAB_SIZE", "SmallRunner", "SmallTarget"]

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 16, 4096, 512
NUM_LIKELY = 40  # tokens that a model answers
# Powers of an odd number mod 2**64: the sum of (token + 1) * power tells texts apart by their beginnings.
POWERS = np.cumprod(np.full(NUM_BLOCKS * BLOCK_SIZE, 0x9E3779B97F4A7C15, np.uint64))


class SmallTarget:
    """A model for checks. `loaded`: folders of the models beside it. `is_used`: whether one of them computed anything.

    Args:
        report: called with what is wrong in the use of a model.
    """

    vocab_size, block_size, num_blocks, device = VOCAB_SIZE, BLOCK_SIZE, NUM_BLOCKS, "cpu"

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report
        self.loaded: list[Path] = []
        self.asks: dict[int, Ask] = {}  # of the latest proposal, by first block
        self.is_used = False
        self._runners: list[SmallRunner] = []

    def load(self, folder: Path) -> "SmallRunner":
        self.loaded.append(Path(folder))
        self._runners.append(SmallRunner(self))
        return self._runners[-1]

    def lose(self, blocks: Sequence[int]) -> None:
        """Others have written in these blocks."""
        for runner in self._runners:
            runner.lose(blocks)

    def ask(self, asks: Sequence[Ask]) -> None:
        """These are asked about from now on."""
        self.asks = {int(ask.blocks[0]): ask for ask in asks}


class SmallRunner:
    """A `ModelRunner` whose answer depends on every token before it. A slot of its cache holds the token computed there and the
    sum of the text up to it, by which a key is found out that was computed for another text or behind one."""

    vocab_size = VOCAB_SIZE

    def __init__(self, target: SmallTarget) -> None:
        self._target = target
        self._tokens = np.full(NUM_BLOCKS * BLOCK_SIZE, -1, np.int64)
        self._sums = np.zeros(NUM_BLOCKS * BLOCK_SIZE, np.uint64)

    def lose(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._tokens[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = -1

    def forward(
        self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray]
    ) -> np.ndarray:
        return self.forward_scored(token_ids, num_before, blocks)[0]

    def forward_scored(
        self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        self._target.is_used = True
        sums = [self._one(*row) for row in zip(token_ids, num_before, blocks, strict=True)]
        tokens = np.array([(each >> 40) % NUM_LIKELY for each in sums], np.int64)
        return tokens, np.array([(1 + (each >> 20) % 256) / 256 for each in sums])

    def forward_top(
        self, token_ids: Sequence[np.ndarray], num_before: Sequence[int], blocks: Sequence[np.ndarray], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        tokens, best = self.forward_scored(token_ids, num_before, blocks)
        ranks = np.arange(count)
        return (tokens[:, None] + ranks) % NUM_LIKELY, best[:, None] / 2**ranks

    def _one(self, token_ids: np.ndarray, num_before: int, blocks: np.ndarray) -> int:
        """The sum of a text with its new tokens; 0 where nothing can be computed."""
        token_ids, blocks = np.asarray(token_ids), np.asarray(blocks)
        if why := _nonsense(token_ids, num_before, blocks):
            self._target.report(why)
            return 0
        end = num_before + len(token_ids)
        places = np.arange(end)
        slots = blocks[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
        ask = self._target.asks.get(int(blocks[0]))
        held = blocks[: -(-end // BLOCK_SIZE)]
        if ask is None or not np.array_equal(ask.blocks[: len(held)], held):
            self._target.report(f"computed in blocks {held[:5].tolist()}, which are no text's that was asked about, in order.")
            return 0
        text = np.concatenate([self._tokens[slots[:num_before]], token_ids])
        known = ask.tokens[:end]
        sums = np.cumsum((text + 1).astype(np.uint64) * POWERS[:end])
        is_wrong = sums[:num_before] != self._sums[slots[:num_before]]
        is_wrong = np.append(is_wrong, np.zeros(len(token_ids), bool))
        is_wrong[: len(known)] |= text[: len(known)] != known
        if is_wrong.any():
            place = int(is_wrong.argmax())
            what = "computed" if place >= num_before else "believed to hold the key of"
            self._target.report(
                f"place {place} of {end} is {what} token {text[place]} of request {ask.request_id}, "
                + (f"which has {known[place]} there; " if place < len(known) else "behind another text; ")
                + "compute anew what was not accepted, and what lies in blocks that were others'."
            )
        self._tokens[slots[num_before:]], self._sums[slots[num_before:]] = token_ids, sums[num_before:]
        return int(sums[-1])


def _nonsense(token_ids: np.ndarray, num_before: int, blocks: np.ndarray) -> str:
    """Why nothing can be computed; empty if it can."""
    for what, numbers, bound in (("token ids", token_ids, VOCAB_SIZE), ("blocks", blocks, NUM_BLOCKS)):
        if numbers.ndim != 1 or not len(numbers) or numbers.dtype.kind not in "iu":
            return f"{what} {numbers!r}; give an array of whole numbers, one or more."
        if numbers.min() < 0 or numbers.max() >= bound:
            return f"{what} from {numbers.min()} to {numbers.max()}; there are 0 to {bound - 1}."
    if num_before < 0 or num_before + len(token_ids) > len(blocks) * BLOCK_SIZE:
        return f"{len(token_ids)} tokens behind {num_before} in {len(blocks)} blocks of {BLOCK_SIZE}; they do not fit."
    return ""
