"""Requests for policies: objects by popularity, sessions that grow, and traces of others."""

import json
from operator import index
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.errors import BenchmarkError


class Rows(NamedTuple):
    """Keys uint64 [n] of all requests, and where each one's begin, int64 [requests + 1]."""

    keys: NDArray[np.uint64]
    offsets: NDArray[np.int64]


def zipf(seed: int, num_requests: int, num_objects: int, power: float) -> NDArray[np.int64]:
    """Independent requests; the object of rank r has a share in proportion to r ** -power. Ranks are in no order of keys."""
    random = np.random.default_rng(seed)
    shares = np.cumsum(np.arange(1, num_objects + 1) ** -power)
    ranks = np.searchsorted(shares, random.random(num_requests) * shares[-1])
    return (random.permutation(num_objects) + 1)[ranks].astype(np.int64)


def sessions(seed: int, num_requests: int, num_sessions: int, turn: int) -> Rows:
    """Each request goes on with a session, which some do more often than others, and adds 1 to 2 * turn - 1 blocks to it;
    after 16 turns the session starts anew."""
    random = np.random.default_rng(seed)
    which = zipf(seed + 1, num_requests, num_sessions, 0.8)
    blocks: dict[int, list[int]] = {}
    turns: dict[int, int] = {}
    rows, num_blocks = [], 0
    for session, more in zip(which.tolist(), random.integers(1, 2 * turn, num_requests).tolist(), strict=True):
        if turns.get(session, 0) % 16 == 0:
            blocks[session] = []
        turns[session] = turns.get(session, 0) + 1
        blocks[session] = [*blocks[session], *range(num_blocks, num_blocks + more)]
        num_blocks += more
        rows.append(blocks[session])
    return as_rows(rows)


def read_trace(path: Path) -> Rows:
    """The `hash_ids` of a file with one JSON object a line. Raises BenchmarkError."""
    try:
        return as_rows([json.loads(line)["hash_ids"] for line in path.read_text().splitlines()])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise BenchmarkError(f"{path} is no trace with hash_ids in each line: {error!r}") from None


def as_rows(rows: list[list[int]]) -> Rows:
    offsets = np.cumsum([0] + [len(row) for row in rows], dtype=np.int64)
    return Rows(np.fromiter((index(key) for row in rows for key in row), np.uint64, int(offsets[-1])), offsets)
