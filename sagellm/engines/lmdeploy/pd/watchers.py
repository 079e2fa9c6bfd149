"""What the proxy is told of an engine: what is cached, how much there is to do, and what steps take."""

import asyncio
import contextlib
from collections import deque
from typing import Any

from sagellm.engines.lmdeploy.pd.offers import Offers
from sagellm.pd.feed import Feed
from sagellm.pd.messages import Load, PrefixChange, StepCost

__all__ = ["Watchers"]

LOAD_EVERY_S = 0.1
MAX_COSTS = 64
MAX_KEYS = 100_000


class Watchers:
    """Every method runs on the engine's loop. Where nobody watches it costs one branch a step."""

    def __init__(self, scheduler: Any, offers: Offers, host: Any) -> None:
        self._scheduler, self._offers = scheduler, offers
        self._feed: Feed | None = next((each for _, each in host.plugins if isinstance(each, Feed)), None)
        self._connections: list[Any] = []
        self._costs: deque[StepCost] = deque(maxlen=MAX_COSTS)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task] = set()

    def add(self, connection: Any) -> PrefixChange:
        """From now on it is told. Returns what is cached now."""
        first = self._feed.watch(asyncio.get_running_loop(), self._tell) if self._feed is not None else ()
        self._connections.append(connection)
        for begin in range(MAX_KEYS, len(first), MAX_KEYS):  # a message has its limit; the others follow the reply
            asyncio.get_running_loop().call_soon(self._tell, PrefixChange(stored=tuple(first[begin : begin + MAX_KEYS])))
        self.changed()
        return PrefixChange(stored=tuple(first[:MAX_KEYS]), is_all=True)

    def remove(self, connection: Any) -> None:
        if connection in self._connections:
            self._connections.remove(connection)

    def note(self, cost: StepCost) -> None:
        self._costs.append(cost)
        self.changed()

    def changed(self) -> None:
        if self._connections and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOAD_EVERY_S, self._tell_load)

    def close(self) -> None:
        self._connections.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _tell_load(self) -> None:
        self._timer = None
        scheduler, blocks = self._scheduler, self._scheduler.sage.kv.counts()
        waiting = [*scheduler.waiting, *scheduler.waiting_migration]
        costs = [*self._costs, *(self._feed.take_costs() if self._feed is not None else ())]
        self._costs.clear()
        self._tell(
            Load(
                num_running=scheduler.num_running() + scheduler.num_locked(), num_waiting=len(waiting),
                waiting_tokens=sum(seq.num_token_ids for seq in waiting),
                free_blocks=blocks.free + blocks.cached, num_held=len(self._offers),
                costs=tuple(costs[-MAX_COSTS:]),
            )
        )  # fmt: skip

    def _tell(self, message: Any) -> None:
        for connection in self._connections:
            task = asyncio.create_task(_quietly(connection, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _quietly(connection: Any, message: Any) -> None:
    with contextlib.suppress(Exception):  # it is closed: that is noticed elsewhere
        await connection.tell(message)
