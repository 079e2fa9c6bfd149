"""Send the proxy what an engine has cached, how much work waits, and what steps take."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sized
from typing import Any

from sagellm.comm_backend.group_messages import Load, PrefixChange, StepCost
from sagellm.engines.lmdeploy.pd.feed import Feed
from sagellm.prefix_reuse import PrefixChanges, changes_of, snapshot_of

__all__ = ["Watchers"]

LOAD_EVERY_S = 0.1
MAX_COSTS = 64
MAX_KEYS = 100_000  # hashes a message


class Watchers:
    """The connections that subscribed. Every method runs on the engine's loop. Without one it costs a branch a step."""

    def __init__(self, scheduler: Any, offers: Sized, host: Any) -> None:
        self._scheduler, self._offers = scheduler, offers
        self._feed: Feed | None = next((each for _, each in host.plugins if isinstance(each, Feed)), None)
        self._connections: list[Any] = []
        self._costs: deque[StepCost] = deque(maxlen=MAX_COSTS)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task] = set()
        self._sequence = 0  # last event of the prefix index that was sent

    def add(self, connection: Any) -> PrefixChange:
        """Subscribe a connection, or send it a new snapshot. Returns the snapshot's first part; the others follow as events."""
        if self._connections:
            self._tell_changes()
        if connection not in self._connections:
            self._connections.append(connection)
        cache = self._scheduler.sage.cache
        whole = snapshot_of(cache.index) if cache.enabled else PrefixChanges(0, 0, is_all=True)
        self._sequence = whole.sequence
        first, *others = _parts(whole)
        for part in others:  # before any later change, which is sent by a timer
            asyncio.get_running_loop().call_soon(self._tell, part, [connection])
        self.changed()
        return first

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

    def _tell_changes(self) -> None:
        cache = self._scheduler.sage.cache
        changes = changes_of(cache.index, self._sequence) if cache.enabled else PrefixChanges(0, 0, is_all=True)
        if changes.sequence != self._sequence:
            self._sequence = changes.sequence
            for part in _parts(changes):
                self._tell(part, self._connections)

    def _tell_load(self) -> None:
        self._timer = None
        self._tell_changes()
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
            ),
            self._connections,
        )  # fmt: skip

    def _tell(self, message: Any, connections: list[Any]) -> None:
        for connection in connections:
            task = asyncio.create_task(_quietly(connection, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def _parts(changes: PrefixChanges) -> list[PrefixChange]:
    """Split changes into messages. Only a snapshot has more hashes than one holds."""
    stored, found = changes.stored, []
    for begin in range(0, max(len(stored), 1), MAX_KEYS):
        part = stored[begin : begin + MAX_KEYS]
        fields = changes._asdict() | {"stored": part, "num_left": len(stored) - begin - len(part)}
        if begin:
            fields |= {"after": changes.sequence, "removed": (), "is_all": False}
        found.append(PrefixChange(**fields))
    return found


async def _quietly(connection: Any, message: Any) -> None:
    with contextlib.suppress(Exception):  # it is closed: that is noticed elsewhere
        await connection.tell(message)
