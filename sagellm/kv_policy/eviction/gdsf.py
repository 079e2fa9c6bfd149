"""Greedy-Dual-Size-Frequency: what costs much to compute again, takes little room and is used often, stays."""

from typing import Any

from sagellm.kv_policy.arguments import require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, PolicyContext
from sagellm.kv_policy.eviction.queues import Ranked

__all__ = ["Gdsf"]


class Gdsf(Ranked):
    """Evict the block of the lowest priority L + uses * cost / size; of equal ones the one whose priority was computed first.

    A priority is computed at the insertion (one use) and at each hit. L is the priority of the last victim, so that blocks
    that are not used fall behind. A new block gets L as it was before the evictions that made room for it, as in the paper.
    Cost is `cost_s` of the block, or 1 if unknown. Size is `size_bytes`, at least 1. There are no options.

    Source: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", HPL-98-69R1, 1998.
    """

    name = "gdsf"

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options)
        # A rank is (priority, when computed).
        self._blocks: dict[BlockKey, tuple[float, int, int]] = {}  # cost, size, uses
        self._inflation = self._latest = 0.0  # L of new priorities, and of the last victim
        self._num_computed = 0

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._blocks)
        self._use(block.key, block.cost_s if block.cost_s > 0 else 1.0, max(1, block.size_bytes), 1)
        self._inflation = self._latest

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._blocks)
        self._inflation = self._latest
        cost, size, num_uses = self._blocks[key]
        self._use(key, cost, size, num_uses + 1)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        super().on_remove(key, evicted)
        del self._blocks[key]

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        decision = super().select_victims(context)
        if decision.victims:
            self._latest = self._ranking[BlockKey(decision.victims[-1])][0]
        return decision

    def _reason(self, key: BlockKey) -> str:
        return f"priority {self._ranking[key][0]:.6g}"

    def _use(self, key: BlockKey, cost: float, size: int, num_uses: int) -> None:
        self._blocks[key] = (cost, size, num_uses)
        self._num_computed += 1
        self._ranking[key] = (self._inflation + num_uses * cost / size, self._num_computed)
