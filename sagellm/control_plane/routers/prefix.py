"""Send a request to where its prefix already is: to the engine that was last sent the longest beginning of its prompt.

Source: the approximation of SGLang's router, which keeps a tree of recent prompts for each engine, by text.
"""

from collections.abc import Sequence

import numpy as np

from sagellm.control_plane.base import EngineView, RouteChoice, Router, RouteRequest
from sagellm.core.errors import PolicyError
from sagellm.core.options import option_checks
from sagellm.prefix_reuse import PrefixReuseIndex

__all__ = ["Prefix"]

BLOCK = 64  # bytes of a prompt
check_number, check_count = option_checks("router", PolicyError)


class Prefix(Router):
    """The engine with the longest prefix, unless it has far more to do than another one.

    An engine's own evictions are not seen: a prefix that it has dropped is looked for there until it is the oldest here.

    Args:
        min_share: a shorter prefix, as a share of the prompt, counts as none.
        slack: requests that the engine with the prefix may have more than the one with the least.
        capacity: blocks of 64 bytes that are remembered of each engine.
    """

    name = "prefix"

    def __init__(self, min_share: float = 0.25, slack: int = 8, capacity: int = 65536) -> None:
        self._min_share = check_number(self.name, "min_share", min_share, 0, 1)
        self._slack = check_count(self.name, "slack", slack)
        self._capacity = check_count(self.name, "capacity", capacity, 1, 1 << 24)
        self._sent: dict[str, _Sent] = {}

    def choose(self, request: RouteRequest, engines: Sequence[EngineView]) -> RouteChoice:
        prompt = np.frombuffer(request.prompt, np.uint8).astype(np.int32)
        prompt = prompt[: len(prompt) // BLOCK * BLOCK]
        # Among engines without work, one that remembers less: its cache has room.
        least = min(engines, key=lambda one: (one.queue[0], self._num_blocks(one.engine_id), one.queue))
        best, reason, detail = least, "least load", f"{least.queue[0]} requests there"
        if len(prompt):
            known = {one.engine_id: self._matched(one.engine_id, prompt) for one in engines}
            first = max(engines, key=lambda one: (known[one.engine_id], *(-part for part in one.queue[:2]), one.engine_id))
            matched = known[first.engine_id]
            if matched and matched >= self._min_share * len(prompt):
                detail = f"{matched} of {len(request.prompt)} bytes were sent to {first.engine_id}"
                if first.queue[0] <= least.queue[0] + self._slack:
                    best, reason = first, "longest prefix"
                else:
                    reason, detail = "least load", f"{detail}, which has {first.queue[0]} requests"
            self._sent.setdefault(best.engine_id, _Sent()).add(prompt, self._capacity)
        return RouteChoice(best.engine_id, reason, detail)

    def forget(self, engine: str) -> None:
        self._sent.pop(engine, None)

    def _num_blocks(self, engine: str) -> int:
        sent = self._sent.get(engine)
        return 0 if sent is None else sent.index.num_blocks()

    def _matched(self, engine: str, prompt: np.ndarray) -> int:
        sent = self._sent.get(engine)
        return 0 if sent is None else sent.index.lookup(prompt, touch=False).matched_length


class _Sent:
    """Prompts that an engine was sent. Blocks are numbered, since an index has ids of KV blocks."""

    def __init__(self) -> None:
        self.index = PrefixReuseIndex(BLOCK)
        self._free: list[int] = []
        self._num = 0

    def add(self, prompt: np.ndarray, capacity: int) -> None:
        """Note a prompt of whole blocks, and forget the oldest ones beyond the capacity."""
        prompt = prompt[: capacity * BLOCK]
        held = self.index.lookup(prompt).kv_block_ids.tolist()
        num_new = len(prompt) // BLOCK - len(held)
        if (excess := self.index.num_blocks() + num_new - capacity) > 0:
            self._free += self.index.evict_lru(excess).kv_block_ids.tolist()
        new = [self._free.pop() if self._free else self._next() for _ in range(num_new)]
        if new:
            self.index.insert(prompt, held + new)

    def _next(self) -> int:
        self._num += 1
        return self._num - 1
