"""Requests for policies: objects by popularity, and sessions that grow."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


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
    keys = np.concatenate(rows).astype(np.uint64) if rows else np.empty(0, np.uint64)
    return Rows(keys, np.cumsum([0] + [len(row) for row in rows], dtype=np.int64))
