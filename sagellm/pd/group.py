"""The engines of a group: their control connections, who is connected to whom, what they have cached and have to do."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp

from sagellm.comm_backend import control
from sagellm.comm_backend.group_info import engine_info
from sagellm.comm_backend.group_messages import EngineFacts, Hello, Release
from sagellm.core.errors import PeerError, PeerTimeoutError, SageError
from sagellm.core.tasks import within
from sagellm.pd.base import EngineView
from sagellm.pd.costs import OnlineCosts
from sagellm.pd.engine import CALL_S, Engine
from sagellm.pd.pairs import Pairs
from sagellm.pd.tokens import prefix_keys

__all__ = ["Engine", "Group", "NotTheOne"]

logger = logging.getLogger("sagellm.pd")

LOOK_S = 1.0  # between two looks for pairs that are not connected
SILENT_S = 60.0  # limit of the engine process, which answers nothing while it computes a step


class NotTheOne(PeerError):
    """An engine that is not who it says it is; another one that cannot be reached may be reached later."""


class Group:
    """Engines join by URL, and leave when their control connection ends or their owner says so.

    The owner looks after their health. Everything runs on the event loop of `start`.

    Args:
        on_change: called when an engine has come, gone or been connected.
        silent_s: an engine that answers nothing for so long hangs.
    """

    def __init__(self, key: bytes, on_change: Callable[[], None] = lambda: None, silent_s: float = SILENT_S) -> None:
        self.key = key
        self._silent_s = silent_s
        self.costs = OnlineCosts()
        self.engines: dict[str, Engine] = {}
        self.http: aiohttp.ClientSession | None = None
        self._on_change = on_change
        self._joining: dict[str, asyncio.Task] = {}
        self._tasks: set[asyncio.Task] = set()
        self._changed = asyncio.Event()
        self._instances: dict[str, str] = {}
        self._pairs = Pairs(self.engines, self._spawn, self._note_change)

    async def start(self) -> None:
        # No limit of connections: each running request has one, or two.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0), timeout=timeout)
        self._spawn(self._look_for_pairs())

    async def close(self) -> None:
        tasks = [*self._tasks, *self._joining.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in list(self.engines.values()):
            await engine.connection.close()
        self.engines.clear()
        if self.http is not None:
            await self.http.close()

    async def join(self, url: str) -> Engine:
        """Connect to an engine; it and the others are told of each other after that. One that is there already is left alone.

        Raises:
            PeerError: it cannot be reached, does not know the key, or is not who it says it is.
        """
        known = self.engines.get(url)
        if known is not None and not known.connection.is_closed:
            return known
        task = self._joining.get(url)
        if task is None:
            task = self._joining[url] = asyncio.create_task(self._join(url))
            task.add_done_callback(lambda _: self._joining.pop(url, None))
        return await asyncio.shield(task)

    async def leave(self, url: str, why: str) -> None:
        if (engine := self.dismiss(url, why)) is not None:
            await engine.connection.close()

    def dismiss(self, url: str, why: str) -> Engine | None:
        """Send an engine nothing more. Its connection stays, and what its requests need of it."""
        engine = self.engines.get(url)
        if engine is not None:
            self._forget(engine, why)
        return engine

    async def changed(self, timeout_s: float) -> None:
        """Wait until an engine has come, gone or been connected, at most so long."""
        event = self._changed
        with contextlib.suppress(asyncio.TimeoutError):
            await within(event.wait(), timeout_s)

    async def silence_of(self, engine: Engine) -> str:
        """Return why the engine hangs, or nothing. Its server lives; the engine, which is another process, may not."""
        try:
            await engine.connection.call(Hello(engine_id="proxy"), self._silent_s)
        except PeerTimeoutError:
            engine.hangs.set()
            return f"the engine below its server has answered nothing for {self._silent_s:g} s"
        except PeerError:  # it has gone, and is taken for that elsewhere
            pass
        return ""

    def give_up(self, first: Engine, transfer_id: int) -> None:
        """Release a transfer on its prefill engine: it will not be fetched, or its prompt is not coming. Does not wait."""

        async def release() -> None:
            with contextlib.suppress(SageError):  # it has gone, and its blocks with it, or their lease ends
                await first.connection.call(Release(transfer_id=transfer_id), CALL_S)

        if not first.connection.is_closed:
            self._spawn(release())

    def decoders(self, model: str | None = None) -> list[Engine]:
        return [one for one in self.engines.values() if one.decodes and model in (None, one.info.model)]

    def views(self, model: str | None, tokens: list[int] | None, without: Iterable[str] = ()) -> list[EngineView]:
        """Return a policy's view of the engines of a model; `without`: instances that have just failed."""
        gone = set(without)
        keys: dict[int, list[int]] = {}
        views = []
        for one in self.engines.values():
            if one.facts.instance in gone or model not in (None, one.info.model):
                continue
            cached = 0
            if tokens is not None and len(one.mirror):
                size = one.facts.block_size
                if size not in keys:
                    keys[size] = prefix_keys(tokens, size)
                cached = min(one.cached_tokens(keys[size]), len(tokens) - 1)
            views.append(self._view(one, cached))
        return views

    def status(self) -> dict[str, Any]:
        """For people and programs: engines, pairs, costs."""
        engines = []
        for one in self.engines.values():
            load = None if one.load is None else one.load.model_dump(exclude={"costs"})
            engines.append({
                "engine_id": one.url, "role": one.facts.role, "instance": one.facts.instance, "model": one.info.model,
                "weights": one.facts.weights, "channel": one.facts.channel, "cached_blocks": len(one.mirror),
                "resyncs": one.num_resyncs, "load": load,
                "waiting_tokens": one.waiting_tokens(), "num_streams": one.num_streams,
                "connected": sorted(self._sources(one)), "refused": dict(one.refused),
                "costs": self.costs.report(one.url), "capabilities": one.facts.capabilities.model_dump(),
            })  # fmt: skip
        return {"engines": engines}

    def _view(self, one: Engine, cached: int) -> EngineView:
        load = one.load
        return EngineView(
            one.url, one.facts.role, cached, one.waiting_tokens(),
            max(load.num_running if load else 0, one.num_streams) if one.decodes else 0,
            load.free_blocks if load else one.facts.num_blocks, one.facts.block_size, one.facts.token_bytes,
            self.costs.of(one.url), self._sources(one), one.facts.timeout_s, one.facts.capabilities,
        )  # fmt: skip

    def _sources(self, one: Engine) -> frozenset[str]:
        return frozenset(
            url for url, instance in one.sources.items()
            if (source := self.engines.get(url)) is not None and source.facts.instance == instance
        )  # fmt: skip

    async def _join(self, url: str) -> Engine:
        assert self.http is not None
        info = await engine_info(self.http, url, self.key, CALL_S)
        if info.engine_id != url:
            raise NotTheOne(f"{url} says that it is {info.engine_id}; register an engine by the URL it gives itself.")
        early: list[Any] = []
        receive: list[Callable[[Any], None]] = [early.append]  # events may come before we know who sends them
        connection = await control.connect(
            info.control, self.key, on_event=lambda _, event: receive[0](event), timeout_s=CALL_S
        )
        try:
            facts = await connection.call(Hello(engine_id="proxy"), CALL_S, EngineFacts)
            if (facts.engine_id, facts.role) != (url, info.role):
                raise NotTheOne(f"{url}, {info.role}: its engine says that it is {facts.engine_id}, {facts.role}.")
            if facts.role not in (roles := facts.capabilities.roles):
                why = facts.capabilities.missing.get("roles", f"it can be {', '.join(roles) or 'none of them'}")
                raise NotTheOne(f"{url} is to be a {facts.role} engine and cannot: {why}.")
            engine = Engine(info, facts, connection, lambda one: self._spawn(self._resync(one)))
            receive[0] = lambda event: engine.on_event(event, self.costs)
            for event in early:
                engine.on_event(event, self.costs)
            await engine.resync()
        except BaseException:
            await connection.close()
            raise
        if (before := self.engines.get(url)) is not None:
            self._forget(before, "it has come back")
        if self._instances.get(url) not in (None, facts.instance):
            self.costs.forget(url)
        self._instances[url] = facts.instance
        self.engines[url] = engine
        self._spawn(self._wait_for_end(engine))
        logger.info("engine %s has joined: %s, model %s, %d blocks", url, facts.role, info.model, facts.num_blocks)
        self._pairs.look()
        self._note_change()
        return engine

    async def _resync(self, engine: Engine) -> None:
        while not engine.connection.is_closed:
            try:
                return await engine.resync()
            except PeerTimeoutError:  # it computes a long step
                continue
            except PeerError:  # it has gone, and is taken for that elsewhere
                return

    async def _wait_for_end(self, engine: Engine) -> None:
        await engine.connection.wait_closed()
        self._forget(engine, "its control connection has ended")

    async def _look_for_pairs(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._pairs.look()

    def _forget(self, engine: Engine, why: str) -> None:
        if self.engines.get(engine.url) is not engine:
            return
        del self.engines[engine.url]
        self._pairs.forget(engine)
        logger.info("engine %s has gone: %s", engine.url, why)
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    def _spawn(self, work: Any) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
