"""The native prefix index, typed."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from sagellm import _core
from sagellm.core.errors import PrefixIndexError
from sagellm.prefix_reuse.base import (
    TIERS,
    CachedBlocks,
    Namespace,
    PrefixEntry,
    PrefixEvent,
    PrefixEventKind,
    PrefixEvents,
    RemovalReason,
    Tier,
)

_KINDS = tuple(PrefixEventKind)
_REASONS = tuple(RemovalReason)


class PrefixReuseIndex(_core.PrefixIndex):
    """`PrefixIndex` (see base.py) as a radix tree in C++; `sagellm/csrc/include/sagellm/prefix_index.h` is the same for C++.

    `lookup`, `insert` and `extend` run without the GIL on 8,192 tokens or more. One lookup in 16 is timed for `metrics`.

    Args:
        block_size: tokens a block, 1 to 256.
        event_capacity: how many of the last events are kept; 0 makes none.

    Raises:
        PrefixIndexError: a size that is not allowed.
    """

    @classmethod
    def restore(cls, snapshot: bytes, *, event_capacity: int = 0) -> "PrefixReuseIndex":
        """The index that `snapshot` was taken of; its counters start anew.

        Raises:
            PrefixIndexError: damaged or foreign bytes.
        """
        if not isinstance(snapshot, bytes):
            raise PrefixIndexError(f"a snapshot is bytes, as snapshot() returns them; got {type(snapshot).__name__}.")
        return cls(event_capacity=event_capacity, _snapshot=snapshot)

    def blocks(self, tier: Tier | str | None = None, *, unlocked: bool = False) -> CachedBlocks:
        return CachedBlocks(*self._blocks(tier, unlocked))

    def entries(self, namespace: str | Namespace | None = None) -> Iterator[PrefixEntry]:
        return iter(self._entries(namespace))

    def events(self, after: int = 0) -> PrefixEvents:
        rows, num_lost, last = self._events(after)
        return PrefixEvents(tuple(_event(row) for row in rows), num_lost, last)


def _event(row: tuple[Any, ...]) -> PrefixEvent:
    sequence, kind, namespace, tier, ids, tokens, parent, hashes, src_tier, src_ids, reason, last_access = row
    kind = _KINDS[kind]
    return PrefixEvent(
        sequence=sequence,
        kind=kind,
        namespace=namespace,
        tier=TIERS[tier],
        kv_block_ids=ids,
        token_ids=tokens,
        parent=None if parent is None else (TIERS[parent[0]], parent[1]),
        block_hashes=hashes,
        src_tier=TIERS[src_tier] if kind is PrefixEventKind.MOVED else None,
        src_block_ids=src_ids,
        reason=_REASONS[reason] if kind is PrefixEventKind.REMOVED else None,
        last_access=last_access,
    )


def prefix_hashes(tokens: Any, block_size: int) -> np.ndarray:
    """uint64 [len(tokens) // block_size], one hash for each full block's whole prefix; see `matcher.prefix_hashes`."""
    return _core.prefix_hashes(tokens, block_size)
