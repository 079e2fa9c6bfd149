"""Least recently used."""

from sagellm.kv_policy.base import BlockKey, EvictionDecision, PolicyContext
from sagellm.kv_policy.eviction.fifo import Fifo

__all__ = ["Lru"]


class Lru(Fifo):
    """Evicts the block whose insertion or last hit is longest ago: a FIFO queue to whose end a hit moves its block.

    No options.
    """

    name = "lru"

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        super().on_hit(key, time_s)
        self._queue.move_to_end(key)

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        context.take_in_order(self._queue, lambda key: "least recently used")
        return context.decision()
