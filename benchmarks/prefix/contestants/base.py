"""Interface of a contestant; the worker does the timing."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.prefix import workload

CHUNK = 250  # at most so many sequences are prepared at a time


class Found(NamedTuple):
    """Result of a lookup. A peer that does not know the `block_ids`, or gives out its own, has None."""

    num_tokens: int
    block_ids: NDArray[np.int32] | None


class Contestant(Protocol):
    """One prefix index, asked as its Python user would ask it.

    Sequences and queries are first brought into the form that its user has at hand; that is not timed. The timed methods
    loop themselves, so that no call of ours is charged.

    Attributes:
        version: of the package.
        parts: names of what `run` can do. The first is a whole lookup, from tokens to block ids (or to the peer's
        answer, if it knows no ids). The others leave something out.
        Note: facts that a reader of the figures should know.
    """

    version: str
    parts: tuple[str, ...]
    note: str

    def sequence(self, sequence: workload.Sequence) -> Any: ...

    def insert(self, sequences: Sequence[Any]) -> None:
        """Timed."""
        ...

    def query(self, tokens: NDArray[np.int32]) -> Any: ...

    def run(self, part: str, queries: Sequence[Any]) -> None:
        """Timed."""
        ...

    def reset(self, prepared: Sequence[Any]) -> None:
        """Undo what `insert` or `run` left in these sequences or queries, as the end of a request would. Not timed."""
        ...

    def found(self, query: Any) -> Found: ...

    def evict(self, num_blocks: int) -> int:
        """Timed. At least this many, least recently used first; how many it were. -1 where the peer evicts nothing itself."""
        ...

    def memory_bytes(self) -> int | None:
        """Its own account of its memory, if it keeps one."""
        ...
