"""The engine's part in a prefill/decode group, called by the inserted lines in LMDeploy's engine."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sagellm.comm_backend.control import ControlConnection
from sagellm.comm_backend.group_messages import Connect, Done, EngineFacts, Fetch, Held, Release, Released
from sagellm.core.config import HookConfig
from sagellm.engines.lmdeploy.pd.arrivals import Arrivals
from sagellm.engines.lmdeploy.pd.distserve import DistServe
from sagellm.engines.lmdeploy.pd.followed import FollowedEngine
from sagellm.engines.lmdeploy.pd.offers import Offers
from sagellm.engines.lmdeploy.pd.peers import Peers
from sagellm.engines.lmdeploy.pd.ranks import open_workers
from sagellm.engines.lmdeploy.pd.watchers import Watchers

__all__ = ["PrefillDecode"]

QUANTILES = (0.5, 0.9, 0.99)
TIMES = ("first_token_s", "joined_s", "decoded_s", "step_s", "waited_s")  # of `Arrivals`


class PrefillDecode(FollowedEngine, DistServe):
    """Every method runs on the engine's loop. Takes the place of LMDeploy's `EngineP2PConnection` and of its migration loop.

    Raises:
        ConfigError: no usable key.
        TransferError: KV blocks cannot be moved here.
    """

    def __init__(self, engine: Any, hooks: HookConfig, host: Any) -> None:
        from lmdeploy.messages import ResponseType
        from lmdeploy.pytorch.messages import MessageStatus

        super().__init__(engine, hooks, host)
        self._status, self._cancelled = MessageStatus, ResponseType.CANCEL
        self._workers = open_workers(engine.executor, self._config, self._is_server)
        self._changed = asyncio.Event()  # what may run, since the engine's last look
        allocator = self._scheduler.block_manager.allocator
        self.offers = Offers(
            self._end_session, self._changed.set, allocator.get_physical_blocks,
            self._workers.checksums if self._config.checksums else None, self._config.lease_s,
        )  # fmt: skip
        self._peers = Peers(self.facts, self._key, self._link, self._workers.disconnect)
        self._watchers = Watchers(self._scheduler, self.offers, host)
        self.arrivals = Arrivals(
            self._scheduler, self._peers, self._workers.transfer, self._workers.cancel, self._wake, self._say,
            self._watchers.note, self._config.timeout_s, hooks.block_bytes // engine.cache_config.block_size,
        )  # fmt: skip
        self._answers: asyncio.Queue | None = None
        self._runnable: Any = None

    def facts(self) -> EngineFacts:
        return EngineFacts(
            role=self._config.role, weights=self._config.weights, channel=self._config.channel,
            endpoints=self._workers.endpoints(), token_bytes=self._workers.token_bytes(), **self.own_facts(),
        )  # fmt: skip

    # ---- the engine's life

    async def run(self, answers: asyncio.Queue, runnable: Any) -> None:
        """In place of LMDeploy's migration loop: until the engine ends. `answers`: what the engine sends out."""
        self._answers, self._runnable = answers, runnable
        waiting = self._engine.migration_event
        try:
            with self._ending_with_it():
                await self._workers.start(on_lost=waiting.set)
                await self._open()
                while True:
                    await waiting.wait()
                    waiting.clear()
                    self._workers.check()
                    for seq in self._scheduler.waiting_migration:
                        self._take(seq)
        finally:
            await self._until_ended()

    def engine_closes(self) -> None:
        """From any thread: LMDeploy ends its workers before it ends `run`."""
        self._workers.may_go()

    async def _end(self) -> None:
        self._workers.may_go()
        self.offers.close()
        await self.arrivals.close()
        await self._peers.close()
        await super()._end()
        await self._workers.close()

    def _take(self, seq: Any) -> None:
        request = seq.migration_request
        if seq.preserve_cache:
            seq.status = self._status.WAITING
            self.offers.expect(seq, request.remote_session_id, request.remote_engine_id)
            self._wake()
        elif request.is_dummy_prefill:
            seq.status = self._status.WAITING
            self._wake()
        else:
            self.arrivals.take(seq)

    def _wake(self) -> None:
        self._changed.set()
        if self._runnable is not None:
            self._runnable.set()

    def _say(self, seq: Any, token: int) -> None:
        """The first token of an answer, as LMDeploy gives out those of a step."""
        from lmdeploy.messages import RequestMetrics
        from lmdeploy.pytorch.engine.engine import InferOutput

        assert self._answers is not None
        metrics = RequestMetrics(time.time(), seq.engine_events)
        out = InferOutput(seq.session_id, seq.resp, np.array([token]), req_metrics=metrics)
        self._answers.put_nowait({seq.session_id: out})

    # ---- what the scheduler's hooks tell

    def step_end(self, running: list[Any], step_s: float) -> None:
        """The results of a step, which took so long, are given out: prompts that are through are ready to be read."""
        for seq in running:
            if seq.preserve_cache and seq.status is self._status.TO_BE_MIGRATED:
                self.offers.computed(seq)
        self._watchers.changed()
        self.arrivals.step_end(running, step_s)
        if len(self.arrivals):
            self.arrivals.freed()

    def kept(self, seq: Any) -> None:
        """LMDeploy's server is through with a request whose blocks are kept."""
        self.offers.kept(seq)

    def ended(self, session_id: int) -> None:
        """A request leaves the engine; its blocks will be free in a moment."""
        self.offers.ended(session_id)
        self.arrivals.ended(session_id)
        self._watchers.changed()
        if self._server is not None:
            asyncio.get_running_loop().call_soon(self._freed)

    def _freed(self) -> None:
        self._changed.set()
        self.arrivals.freed()

    def queue_changed(self) -> None:
        """A request has come, or has lost its place and waits again."""
        self._changed.set()

    async def wait_for_room(self, may_run: asyncio.Event) -> bool:
        """No prompt finds room. Where blocks are kept for others, look again as soon as some come back, or somebody else may
        be the next. Nothing else changes what may run: no step is on its way, and whatever ends an offer, be it its lease,
        wakes this. No change is missed: the event is cleared only before a look."""
        if not len(self.offers):
            return False
        may_run.set()
        await self._changed.wait()
        may_run.clear()
        self._changed.clear()
        return True

    def _end_session(self, session_id: int) -> None:
        session = self._scheduler.sessions.get(session_id)
        if session is None:
            return
        for seq in session.sequences.values():
            if seq.status not in (self._status.TO_BE_MIGRATED, self._status.STOPPED) and seq.resp is not None:
                seq.resp.type = self._cancelled
                self._engine.req_manager.response(seq.resp)
        self._engine.end_session(session_id)
        self._wake()  # somebody may have waited for the blocks

    async def connect_peer(self, engine_id: str, address: str) -> None:
        """As `Connect` of the proxy asks. Raises PeerError or TransferError."""
        await self._peers.connect(engine_id, address)

    # ---- what others ask

    def _handlers(self) -> Mapping[type, Any]:
        return {**super()._handlers(), Connect: self._connect, Fetch: self._fetch, Release: self._release}

    async def _connect(self, _: ControlConnection, message: Connect) -> Done:
        await self.connect_peer(message.engine_id, message.address)
        return Done()

    async def _link(self, facts: EngineFacts) -> None:
        await self._workers.connect(facts.engine_id, facts.endpoints)

    async def _fetch(self, connection: ControlConnection, message: Fetch) -> Held:
        return await self.offers.fetch(message.transfer_id, message.timeout_s, connection)

    async def _release(self, _: ControlConnection, message: Release) -> Released:
        return Released(was_held=self.offers.release(message.transfer_id))

    def _lost(self, connection: ControlConnection) -> None:
        super()._lost(connection)
        self.offers.lost(connection, connection.peer or "")

    # ---- report

    def report(self) -> dict[str, Any]:
        """Numbers for `/metrics`."""
        return {
            "address": self._address, "offers": dict(self.offers.counts), "held": len(self.offers),
            "arrivals": dict(self.arrivals.counts),
            "arriving": len(self.arrivals), "seconds": dict(self.arrivals.seconds), "bytes": self.arrivals.num_bytes,
            "channel": self._workers.report(), "peers": self._peers.names(),
        } | {name: _quantiles(getattr(self.arrivals, name)) for name in TIMES}  # fmt: skip


def _quantiles(samples: Iterable[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {str(at): ordered[min(len(ordered) - 1, int(at * len(ordered)))] for at in QUANTILES} if ordered else {}
