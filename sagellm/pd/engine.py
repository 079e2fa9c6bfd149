"""One engine of a group: its load, its cached prefixes and its connections."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from sagellm.comm_backend.group_info import EngineAddress
from sagellm.comm_backend.group_messages import EngineFacts, Load, PrefixChange, Subscribe
from sagellm.pd.answers import Ending
from sagellm.pd.costs import OnlineCosts
from sagellm.prefix_reuse import EventGap, PrefixChanges, PrefixMirror

__all__ = ["CALL_S", "Engine"]

logger = logging.getLogger("sagellm.pd")

CALL_S = 10.0  # longest wait for the reply of a living engine


class Engine:
    """One engine that has joined, for as long as its control connection lives."""

    def __init__(
        self, info: EngineAddress, facts: EngineFacts, connection: Any, on_gap: "Callable[[Engine], Any]" = lambda _: None
    ) -> None:
        self._on_gap = on_gap
        self.info, self.facts, self.connection = info, facts, connection
        self.url = info.engine_id
        self.mirror = PrefixMirror(facts.block_size)
        self.num_resyncs = 0
        self._early: list[PrefixChange] | None = []  # changes that came before the snapshot they follow
        self.load: Load | None = None
        self.sources: dict[str, str] = {}  # prefill engine -> its instance that this one is connected to
        self.refused: dict[str, str] = {}  # prefill engine -> why not
        self._pending: dict[int, tuple[float, int]] = {}  # transfer -> when it was sent, tokens of its prompt
        self._heard = 0.0
        self.num_streams = 0
        self.hangs = Ending()  # it lives and answers nothing: its requests would wait for ever

    @property
    def decodes(self) -> bool:
        return self.facts.role != "prefill"

    def on_event(self, event: Any, costs: OnlineCosts) -> None:
        if isinstance(event, Load):
            self.load, self._heard = event, time.monotonic()
            costs.observe(self.url, event.costs)
        elif isinstance(event, PrefixChange):
            if event.is_all:  # the cache was cleared, or the engine's index keeps the lost events no longer
                self._early = None
            if self._early is not None:
                self._early.append(event)
            else:
                self._follow(event)

    def _follow(self, change: PrefixChange) -> None:
        try:
            self.mirror.apply(PrefixChanges(**dict(change)))
        except EventGap as error:
            logger.warning("engine %s: an event of its prefix cache was lost (%s)", self.url, error)
            self.num_resyncs += 1
            self._early = []
            self._on_gap(self)

    async def resync(self) -> None:
        """Replace the copy of its prefix cache by a snapshot.

        Raises:
            PeerError: the engine does not answer.
        """
        whole = await self.connection.call(Subscribe(), CALL_S, PrefixChange)
        early, self._early = self._early or [], None
        for change in (whole, *early):
            if self._early is None:
                self._follow(change)

    def sent(self, number: int, num_tokens: int) -> None:
        """A prompt that it has to compute; until `computed`."""
        self._pending[number] = (time.monotonic(), num_tokens)

    def computed(self, number: int) -> None:
        self._pending.pop(number, None)

    def waiting_tokens(self) -> int:
        """Return its last figure plus what was sent since, and at least all that was sent and is not computed."""
        said = self.load.waiting_tokens if self.load else 0
        since = sum(tokens for at, tokens in self._pending.values() if at >= self._heard)
        return max(said + since, sum(tokens for _, tokens in self._pending.values()))

    def cached_tokens(self, keys: Sequence[int]) -> int:
        return self.mirror.index.match_hashes(keys)
