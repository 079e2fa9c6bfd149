"""Recency, frequency and depth in one number."""

import math
from typing import Any

from sagellm.kv_policy.arguments import check_option, require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock
from sagellm.kv_policy.eviction.queues import Ranked

__all__ = ["PrefixReuse"]


class PrefixReuse(Ranked):
    """Evict the block with the lowest faded sum of uses; deeper blocks count less, since fewer requests share them.

    A use counts 1 and fades by half every `half_life` ticks; a tick is an insertion or hit of any block. Scores are
    logarithms, so that those of different moments compare: score = last use / half_life + log2(sum at the last use) -
    depth_weight * log2(depth). Among equal scores the least recently used block is evicted.

    Options: `half_life` in ticks (default 4 * capacity), at least 1e-9; `depth_weight` (.25), at least 0.

    Source: the sum is the CRF of LRFU, Lee et al., IEEE ToC 2001.
    """

    name = "prefix_reuse"

    def __init__(
        self, capacity: int, *, half_life: float | None = None, depth_weight: float = 0.25, **options: Any
    ) -> None:
        super().__init__(capacity, **options)
        self._half_life = 4.0 * capacity if half_life is None else check_option(self.name, "half_life", half_life)
        self._depth_weight = check_option(self.name, "depth_weight", depth_weight)
        # A rank is (score, tick of the last use).
        self._uses: dict[BlockKey, tuple[float, int]] = {}  # faded sum at the last use, depth
        self._tick = 0

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._uses)
        self._tick += 1
        self._use(block.key, 1.0, block.depth)

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._uses)
        self._tick += 1
        faded, depth = self._uses[key]
        last_use = self._ranking[key][1]
        self._use(key, 1.0 + faded * math.pow(2.0, -(self._tick - last_use) / self._half_life), depth)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        super().on_remove(key, evicted)
        del self._uses[key]

    def _reason(self, key: BlockKey) -> str:
        return f"score {self._ranking[key][0]:.6g}"

    def _use(self, key: BlockKey, faded: float, depth: int) -> None:
        self._uses[key] = (faded, depth)
        score = self._tick / self._half_life + math.log2(faded) - self._depth_weight * math.log2(depth)
        self._ranking[key] = (score, self._tick)
