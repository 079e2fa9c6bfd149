"""A plug-in that measures an engine's steps for the proxy of its group."""

import threading
from collections import deque

from sagellm.comm_backend.group_messages import StepCost
from sagellm.core.hooks import Phase, Plugin, StepResult

__all__ = ["Feed"]

MAX_COSTS = 64


class Feed(Plugin):
    """Keeps the costs of the last steps. Hooks run on a thread of the host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._costs: deque[StepCost] = deque(maxlen=MAX_COSTS)

    def take_costs(self) -> list[StepCost]:
        """Return the costs of steps since the last call, the latest `MAX_COSTS`."""
        with self._lock:
            costs = list(self._costs)
            self._costs.clear()
        return costs

    def on_step_end(self, result: StepResult) -> None:
        cost = StepCost(
            kind="prefill" if result.phase is Phase.PREFILL else "decode", num_tokens=result.num_tokens,
            num_requests=result.num_requests, num_context=result.num_context_tokens, seconds=result.duration_s,
        )  # fmt: skip
        with self._lock:
            self._costs.append(cost)
