"""Prompts of a round as token ids: lengths, shared prefixes, and what a cold prefix cache could make of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from benchmarks.config import Constant, Length, LogNormal, Trace, Uniform, Workload
from benchmarks.errors import BenchmarkError
from benchmarks.load.arrivals import TRACE_BLOCK, read_trace

FIRST_ID = 300  # special tokens and single bytes lie below in most vocabularies
_LENGTHS, _PREFIX, _TAIL, _HASHED, _ORDER = range(1, 6)  # streams of random numbers; arrivals have stream 0
_CLASS_SEEDS = 10**15  # between the seeds of two classes; rounds, warm-ups and points of a sweep lie closer together


@dataclass(frozen=True)
class Prompt:
    """Token ids of one request, the number of tokens asked for, and which of the workload's classes it is of."""

    ids: list[int]
    max_tokens: int
    load_class: int = 0


@dataclass(frozen=True)
class TextTokens:
    """Pieces of a text as prompts. The first two tokens of a piece are random, so that no two pieces share a block.

    Attributes:
        tokens: the text, int64 [tokens].
        ids: what the first tokens of a piece are drawn from.
    """

    tokens: np.ndarray
    ids: range

    def __len__(self) -> int:
        return len(self.ids)

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return `count` tokens; a piece longer than the text begins it again."""
        start = rng.integers(len(self.tokens))
        piece = np.take(self.tokens, np.arange(start, start + count), mode="wrap")
        piece[:2] = _draw(self.ids, len(piece[:2]), rng)
        return piece


Tokens = range | TextTokens


def allowed_ids(vocab_size: int) -> range:
    """Ids that prompts are made of: all from 300, or the upper half of a vocabulary under 600."""
    return range(min(FIRST_ID, vocab_size // 2), vocab_size)


def make_prompts(workload: Workload, seed: int, ids: Tokens) -> list[Prompt]:
    """The prompts of one round, in the order of sending. Every token depends on `seed`: seeds share no block.

    With `reuse`, the first round(reuse * length) tokens of a prompt come from one of `num_prefixes` prefixes, drawn
    evenly; a shorter share is the beginning of a longer one. In a trace, equal hash_ids are equal tokens. Classes come
    in random order, as many of each in every round, and share nothing with each other.

    Raises:
        BenchmarkError: a trace that cannot be read or is too short; fewer than 16 ids.
    """
    if len(ids) < 16:
        raise BenchmarkError(f"prompts can be made of {len(ids)} token ids; at least 16 are needed to tell them apart")
    if isinstance(workload.arrivals, Trace):
        return _traced(workload.arrivals, workload.num_requests, seed, ids)
    if workload.classes:
        return _mixed(workload, seed, ids)
    rng = np.random.default_rng([seed, _LENGTHS])
    lengths = draw_lengths(workload.prompt_tokens, workload.num_requests, rng)
    outputs = draw_lengths(workload.output_tokens, workload.num_requests, rng)
    kinds = rng.integers(workload.num_prefixes, size=workload.num_requests)
    shares = np.rint(workload.reuse * lengths).astype(np.int64)
    prefixes = {kind: _tokens(ids, shares[kinds == kind].max(), seed, _PREFIX, kind) for kind in np.unique(kinds)}
    tail = np.random.default_rng([seed, _TAIL])
    prompts = []
    for length, share, kind, output in zip(lengths, shares, kinds, outputs, strict=True):
        own = _draw(ids, length - share, tail)
        prompts.append(Prompt(np.concatenate([prefixes[kind][:share], own]).tolist(), int(output)))
    return prompts


def draw_lengths(length: Length, count: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [count]."""
    if isinstance(length, Constant):
        return np.full(count, length.value)
    if isinstance(length, Uniform):
        return rng.integers(length.low, length.high, count, endpoint=True)
    return _lognormal(length, count, rng)


def shared_tokens(prompts: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """For each prompt, in order, its tokens in whole blocks that begin an earlier prompt as well.

    No prefix cache that was empty at first can hit more, if it keeps whole blocks only and leaves at least one token of
    a prompt to compute. Exact (no hashes of content stand for it); O(all tokens).
    """
    children: dict[tuple[int, bytes], int] = {}  # (node, the block that follows) -> node; 0 is the root
    shared = []
    for prompt in prompts:
        tokens = np.asarray(prompt, dtype=np.int64)
        node, hit, known = 0, 0, True
        for start in range(0, len(tokens) - block_size + 1, block_size):
            edge = (node, tokens[start : start + block_size].tobytes())
            child = children.get(edge)
            known = known and child is not None and start + block_size < len(tokens)
            hit += block_size * known
            node = children.setdefault(edge, len(children) + 1) if child is None else child
        shared.append(hit)
    return shared


def _traced(trace: Trace, num_requests: int, seed: int, ids: Tokens) -> list[Prompt]:
    """A block keeps its boundaries when it is scaled, so that prompts share the same blocks at every scale."""
    block = max(1, round(TRACE_BLOCK * trace.scale))
    blocks: dict[int, np.ndarray] = {}
    prompts = []
    for row in read_trace(trace, num_requests):
        whole, rest = divmod(row.input_length, TRACE_BLOCK)
        length = max(1, whole * block + round(rest * block / TRACE_BLOCK))
        for name in row.hash_ids:
            if name not in blocks:
                blocks[name] = _tokens(ids, block, seed, _HASHED, name)
        tokens = np.concatenate([blocks[name] for name in row.hash_ids])[:length]
        prompts.append(Prompt(tokens.tolist(), max(1, round(row.output_length * trace.scale))))
    return prompts


def _mixed(workload: Workload, seed: int, ids: Tokens) -> list[Prompt]:
    """Each class has the prompts that it would have alone."""
    counts = workload.class_counts()
    queues = []
    for number, (each, count) in enumerate(zip(workload.classes, counts, strict=True)):
        lengths = {"prompt_tokens": each.prompt_tokens, "output_tokens": each.output_tokens}
        reuse = {"reuse": each.reuse, "num_prefixes": each.num_prefixes}
        alone = workload.model_copy(update={"classes": (), "num_requests": count} | lengths | reuse)
        queues.append(iter(make_prompts(alone, seed + _CLASS_SEEDS * number, ids)))
    order = np.random.default_rng([seed, _ORDER]).permutation(np.repeat(np.arange(len(counts)), counts))
    return [replace(next(queues[number]), load_class=int(number)) for number in order]


def _tokens(ids: Tokens, count: int, *seed: int) -> np.ndarray:
    return _draw(ids, count, np.random.default_rng(list(seed)))


def _draw(ids: Tokens, count: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(ids.start, ids.stop, count) if isinstance(ids, range) else ids.draw(count, rng)


def _lognormal(length: LogNormal, count: int, rng: np.random.Generator) -> np.ndarray:
    """Drawing again until a value lies inside is drawing from the truncated distribution, here by its inverse."""
    normal = NormalDist(np.log(length.median), length.sigma)
    low, high = (normal.cdf(np.log(bound)) for bound in (length.low - 0.5, length.high + 0.5))
    # The ends themselves have no finite inverse when a bound is far out.
    draws = np.clip(rng.uniform(low, high, count), 1e-12, 1 - 1e-12)
    values = np.rint(np.exp([normal.inv_cdf(draw) for draw in draws])).astype(np.int64)
    return np.clip(values, length.low, length.high)
