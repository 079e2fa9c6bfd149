"""Belady's policy: knows the future, and so bounds what any other can reach where all blocks may go."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from sagellm.core.errors import PolicyError
from sagellm.kv_policy.arguments import require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_policy.eviction.queues import Ranked

__all__ = ["Belady", "FarthestNextUse"]


class FarthestNextUse(Ranked):
    """Belady's choice, wherever the future is known from. `on_insert` ranks a block by minus its next use, then by what breaks
    ties; the lowest goes."""

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options)
        self._num_inserted = 0

    @abstractmethod
    def _next_use(self, key: BlockKey) -> float:
        """When the block of this event is used next; infinity for never. Asked once an event."""

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._ranking)
        self._ranking[key] = (-self._next_use(key), *self._ranking[key][1:])

    def _reason(self, key: BlockKey) -> str:
        next_use = -self._ranking[key][0]
        return "never used again" if next_use == math.inf else f"next use {int(next_use)}"


class Belady(FarthestNextUse):
    """Evicts the block whose next use is farthest away, one that is never used again first of all; of equal ones the one that
    was inserted first. In prefix mode, where a block may go only after those below it, this is a good policy and no bound.

    Options: `future`, the keys of all insertions and hits, in the order in which they will be told. Each event takes one.

    Raises:
        PolicyError: in an event whose key is not the next one of `future`, or beyond its end.

    Source: Belady, IBM Systems Journal 1966 (MIN).
    """

    name = "belady"

    def __init__(self, capacity: int, *, future: Sequence[int] | None = None, **options: Any) -> None:
        super().__init__(capacity, **options)
        if future is None:
            raise PolicyError("policy belady: option future is missing; give the keys of all events in order.")
        try:
            self._future = [int(key) for key in future]
        except (TypeError, ValueError):
            raise PolicyError(
                "policy belady: option future is no sequence of keys; give those of all events."
            ) from None
        self._next_uses = _next_uses(self._future)
        self._num_events = 0

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._ranking)
        next_use = self._next_use(block.key)
        self._num_inserted += 1
        self._ranking[block.key] = (-next_use, self._num_inserted)

    def _next_use(self, key: BlockKey) -> float:
        event = self._num_events
        if event >= len(self._future) or self._future[event] != key:
            told = f"foretold was {self._future[event]}" if event < len(self._future) else "foretold was the end"
            raise PolicyError(
                f"policy belady: event {event} is block {key}, {told}; give the future of these very events."
            )
        self._num_events += 1
        return self._next_uses[event]


def _next_uses(future: list[int]) -> list[float]:
    """Return for each event the place of the next one with the same key, or infinity."""
    next_use = [math.inf] * len(future)
    seen: dict[int, int] = {}
    for event in range(len(future) - 1, -1, -1):
        next_use[event] = seen.get(future[event], math.inf)
        seen[future[event]] = event
    return next_use
