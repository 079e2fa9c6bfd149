"""Connections between engines: each engine that decodes to each prefill engine."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sagellm.comm_backend.group_messages import Connect, Done, EngineFacts
from sagellm.core.errors import SageError, TransferError
from sagellm.pd.engine import Engine

__all__ = ["Pairs"]

logger = logging.getLogger("sagellm.pd")

CONNECT_S = 30.0  # for an engine that opens connections itself
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0


class Pairs:
    """A task for each pair that is not connected, so that an engine that hangs holds up no other. One that failed is tried
    again, later each time; one whose engines do not fit is kept apart until either of them is another instance.

    Everything runs on the group's event loop.

    Args:
        engines: of the group, by URL; they come and go.
        spawn: makes a task of the group.
        note_change: called when a pair was connected.
    """

    def __init__(
        self, engines: dict[str, Engine], spawn: Callable[[Any], asyncio.Task], note_change: Callable[[], None]
    ) -> None:
        self._engines, self._spawn, self._note_change = engines, spawn, note_change
        self._tasks: dict[tuple[Engine, Engine], asyncio.Task] = {}
        self._apart: dict[tuple[str, str], tuple[str, str, str]] = {}  # URLs -> instances that do not fit, and why

    def look(self) -> None:
        """Begins to connect what is not connected. Waits for nothing."""
        prefills = [one for one in self._engines.values() if one.facts.role == "prefill"]
        for second in filter(lambda one: one.decodes, self._engines.values()):
            for first in prefills:
                if second.sources.get(first.url) == first.facts.instance or (second, first) in self._tasks:
                    continue
                *instances, why = self._apart.get((second.url, first.url), ("", "", ""))
                if instances == [second.facts.instance, first.facts.instance]:
                    second.refused[first.url] = why
                else:
                    self._start(second, first)

    def forget(self, engine: Engine) -> None:
        """It has left the group."""
        for pair, task in list(self._tasks.items()):
            if engine in pair:
                task.cancel()
        for one in self._engines.values():
            one.refused.pop(engine.url, None)

    def _start(self, second: Engine, first: Engine) -> None:
        task = self._tasks[second, first] = self._spawn(self._connect(second, first))
        task.add_done_callback(lambda _: self._tasks.pop((second, first)))

    async def _connect(self, second: Engine, first: Engine) -> None:
        backoff_s = FIRST_BACKOFF_S
        while (why := await self._refusal(second, first)) is not None:
            if second.refused.get(first.url) != why:
                logger.warning("%s does not load from %s: %s", second.url, first.url, why)
            second.refused[first.url] = why
            if not _fits(second.facts, first.facts):
                self._apart[second.url, first.url] = (second.facts.instance, first.facts.instance, why)
                return
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        second.sources[first.url] = first.facts.instance
        second.refused.pop(first.url, None)
        logger.info("%s loads from %s over %s", second.url, first.url, first.facts.channel)
        self._note_change()

    async def _refusal(self, second: Engine, first: Engine) -> str | None:
        """In the words of the engine that decodes; None: it is connected."""
        try:
            await second.connection.call(Connect(engine_id=first.url, address=first.info.control), CONNECT_S, Done)
        except SageError as error:
            return str(error)
        return None


def _fits(second: EngineFacts, first: EngineFacts) -> bool:
    """Whether what an engine refuses it may take later: it is not what both engines are as long as they live."""
    from sagellm.comm_backend.kv_transfer.conversion import fit  # torch with it

    if (second.weights, second.channel) != (first.weights, first.channel):
        return False
    try:
        for endpoint in second.endpoints:
            fit(endpoint.layout, [one.layout for one in first.endpoints])
    except TransferError:
        return False
    return True
