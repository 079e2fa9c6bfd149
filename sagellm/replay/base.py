"""Inputs and results of a replay: a trace as flat arrays, and counts by request."""

import hashlib
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sagellm.core.errors import TraceError

MAX_TOKENS = 2**31 - 1
MAX_KEY = 2**64 - 1
MAX_BLOCKS = 1 << 30  # of a tier, and of a trace; native code counts blocks with 32 bits
MAX_TRACE_BLOCKS = 20_000_000  # of all requests; reading takes about 70 bytes for each
DEFAULT_BLOCK_SIZE = 64  # tokens, where the trace itself does not say: the engine's own default


class Semantics(str, Enum):
    """Meaning of a hit. PREFIX: leading blocks of a request that are all there, locked while it runs. OBJECT: each key
    alone."""

    PREFIX = "prefix"
    OBJECT = "object"


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they are replayed. r requests with n blocks in all; every array is read-only.

    Attributes:
        name: of the file or the generator.
        block_size: tokens of a full block.
        times_s: float64 [r], never falling.
        input_tokens, output_tokens: int32 [r].
        keys: uint64 [n], the blocks of each prompt, root first.
        offsets: int64 [r + 1]: request i has `keys[offsets[i]:offsets[i + 1]]`.
        tenants: one a request, or empty.
        lines: int64 [r], where each request stands in its file; empty for a generated trace.
        sha256: of the file, or of the arrays of a generated trace.
        num_skipped: malformed lines that were passed over.
    """

    name: str
    block_size: int
    times_s: NDArray[np.float64]
    input_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    keys: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    tenants: tuple[str, ...] = ()
    lines: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    sha256: str = ""
    num_skipped: int = 0

    def __post_init__(self) -> None:
        arrays = (self.times_s, self.input_tokens, self.output_tokens, self.keys, self.offsets, self.lines)
        for array in arrays:
            array.flags.writeable = False
        if not self.sha256:
            digest = hashlib.sha256(f"{self.block_size} {self.tenants}".encode())
            for array in arrays:
                digest.update(array.tobytes())
            object.__setattr__(self, "sha256", digest.hexdigest())

    @property
    def num_requests(self) -> int:
        return len(self.times_s)

    @property
    def num_accesses(self) -> int:
        """Blocks of all requests."""
        return len(self.keys)

    @cached_property
    def num_distinct_blocks(self) -> int:
        return len(np.unique(self.keys))

    @cached_property
    def blocks_of(self) -> NDArray[np.int64]:
        """int64 [r]: blocks of each request."""
        return np.diff(self.offsets)

    def output_blocks(self) -> NDArray[np.int32]:
        """int32 [r]: blocks that each answer needs beside those of its prompt, the room left in the prompt's last one used."""
        total = self.input_tokens.astype(np.int64) + self.output_tokens
        return np.maximum(-(-total // self.block_size) - self.blocks_of, 0).astype(np.int32)

    def key_tokens(self) -> NDArray[np.int64]:
        """int64 [n]: tokens of each block of each request."""
        places = np.arange(len(self.keys)) - np.repeat(self.offsets[:-1], self.blocks_of)
        left = np.repeat(self.input_tokens.astype(np.int64), self.blocks_of) - places * self.block_size
        return np.clip(left, 0, self.block_size)


@dataclass(frozen=True)
class PrefixCounts:
    """Counts of a replay with prefix semantics.

    Attributes:
        hit_blocks: int32 [r], leading blocks that each request found when it was first admitted.
        retries: admissions after a preemption; `retry_hit_blocks` of their `retry_blocks` blocks were found.
        num_evicted: blocks; `num_evicted_soon` of them came back soon after.
        num_preempted: how often a request lost its blocks to another one.
        num_oversized: requests with more blocks than the tier has room for.
    """

    hit_blocks: NDArray[np.int32]
    retries: int = 0
    retry_hit_blocks: int = 0
    retry_blocks: int = 0
    num_evicted: int = 0
    num_evicted_soon: int = 0
    num_preempted: int = 0
    num_oversized: int = 0


@dataclass(frozen=True)
class ObjectCounts:
    """Counts of a replay with object semantics.

    Attributes:
        hits: bool [n], by block of the trace.
        num_evicted: blocks; `num_evicted_soon` of them came back soon after, None where that was not counted.
    """

    hits: NDArray[np.bool_]
    num_evicted: int = 0
    num_evicted_soon: int | None = None


def overlap(keys: NDArray[np.uint64], offsets: NDArray[np.int64]) -> tuple[int, int, int] | None:
    """The first block that has two parents: (key, index of the request that brought it, index of the one that differs).

    A key names a prefix, so the block before it is always the same, or always none. O(n log n).
    """
    if not len(keys):
        return None
    first_of_row = np.zeros(len(keys), bool)
    first_of_row[offsets[:-1][np.diff(offsets) > 0]] = True
    parents = np.roll(keys, 1)
    parents[first_of_row] = 0
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    origin = first[inverse]
    differs = (parents != parents[origin]) | (first_of_row != first_of_row[origin])
    places = np.flatnonzero(differs)
    if not len(places):
        return None
    place = int(places[0])
    rows = np.searchsorted(offsets, [origin[place], place], side="right") - 1
    return int(keys[place]), int(rows[0]), int(rows[1])


def check_prefixes(trace: Trace) -> None:
    """Raises TraceError if a block stands under two parents, which has no meaning as a prefix."""
    found = overlap(trace.keys, trace.offsets)
    if found is not None:
        key, first, second = found
        lines = trace.lines if len(trace.lines) else np.arange(trace.num_requests) + 1
        raise TraceError(
            f"{trace.name}, line {lines[second]}: overlapping ids: block {key} continues another prefix than in line "
            f"{lines[first]}; with prefix semantics an id stands for all tokens up to its block. Mend the trace, leave such "
            "lines out with --skip-bad, or replay it with --semantics object."
        )


def num_blocks(text: str) -> int | None:
    """The text as the size of a tier, 1 to MAX_BLOCKS; None if it is no such number."""
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_BLOCKS))
    return int(text) if is_number and 1 <= int(text) <= MAX_BLOCKS else None


def shortened(value: object) -> str:
    """The value for a message: 40 characters of its `repr`, in which nothing can steer a terminal."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge integer"
    return text if len(text) <= 40 else f"{text[:37]}..."
