"""A plug-in that knows what an engine has cached and what its steps take, for who routes requests to it."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from sagellm.core.hooks import EvictionNotice, EvictionReason, Phase, Plugin, PrefixUpdate, StepResult
from sagellm.pd.messages import PrefixChange, StepCost

__all__ = ["Feed"]

MAX_COSTS = 64


class Feed(Plugin):
    """Hooks run on a thread of the host; what is watched is told on the watcher's loop, in the order in which it happened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key_of: dict[int, int] = {}  # block -> key of the prefix that ends with it
        self._costs: deque[StepCost] = deque(maxlen=MAX_COSTS)
        self._tell: Callable[[PrefixChange], Any] | None = None

    def watch(self, loop: Any, tell: Callable[[PrefixChange], Any]) -> tuple[int, ...]:
        """Keys of all that is cached; `tell` hears of all changes after that."""
        with self._lock:
            self._tell = lambda change: loop.call_soon_threadsafe(tell, change)
            return tuple(dict.fromkeys(self._key_of.values()))

    def take_costs(self) -> list[StepCost]:
        """Of steps since the last call, the latest `MAX_COSTS`."""
        with self._lock:
            costs = list(self._costs)
            self._costs.clear()
        return costs

    def on_prefix_stored(self, update: PrefixUpdate) -> None:
        keys = [int(key) for key in update.block_hashes]
        with self._lock:
            self._key_of.update(zip(update.block_ids, keys, strict=False))
            self._say(PrefixChange(stored=tuple(keys)))

    def on_evicted(self, notice: EvictionNotice) -> None:
        if notice.reason is not EvictionReason.PREFIX:
            return  # blocks of a request, which nobody could find
        with self._lock:
            gone = [self._key_of.pop(block) for block in notice.block_ids if block in self._key_of]
            if gone:
                self._say(PrefixChange(removed=tuple(gone)))

    def on_step_end(self, result: StepResult) -> None:
        kind = "prefill" if result.phase is Phase.PREFILL else "decode"
        with self._lock:
            self._costs.append(
                StepCost(
                    kind=kind, num_tokens=result.num_tokens, num_requests=result.num_requests,
                    num_context=result.num_context_tokens, seconds=result.duration_s,
                )
            )  # fmt: skip

    def _say(self, change: PrefixChange) -> None:
        if self._tell is not None:
            self._tell(change)
