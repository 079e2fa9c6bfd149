"""An engine that tells who has its key which prefixes it has cached."""

import asyncio
import contextlib
import logging
import os
import uuid
from collections.abc import Mapping
from typing import Any

from sagellm.comm_backend.control import ControlConnection, ControlServer, read_key
from sagellm.comm_backend.group_messages import Capabilities, EngineFacts, Hello, PrefixChange, Subscribe
from sagellm.core.config import HookConfig
from sagellm.core.errors import PeerError, SageError
from sagellm.engines.lmdeploy.capabilities import pytorch_capabilities
from sagellm.engines.lmdeploy.pd.peers import refusal
from sagellm.engines.lmdeploy.pd.watchers import Watchers

__all__ = ["FollowedEngine"]

logger = logging.getLogger("sagellm")


class FollowedEngine:
    """Serves control connections. Every method runs on the engine's loop, which runs `run` for LMDeploy's migration loop.

    Raises:
        ConfigError: no usable key.
    """

    def __init__(self, engine: Any, hooks: HookConfig, host: Any) -> None:
        assert hooks.pd is not None
        self._engine, self._scheduler, self._config, self._model = engine, engine.scheduler, hooks.pd, hooks.model
        self._key = read_key(self._config.key_file)
        self._is_server = hooks.run_dir is not None
        self._instance = uuid.uuid4().hex
        found = pytorch_capabilities(engine.cache_config.device_type)
        self._capabilities = Capabilities(**{name: getattr(found, name) for name in Capabilities.model_fields})
        self._watchers = Watchers(self._scheduler, (), host)
        self._server: ControlServer | None = None
        self._address = ""

    def facts(self) -> EngineFacts:
        return EngineFacts(role="hybrid", weights="", channel="", endpoints=(), token_bytes=0, **self.own_facts())

    def own_facts(self) -> dict[str, Any]:
        """Return the facts that do not depend on a group."""
        cache = self._scheduler.cache_config
        return {
            "engine_id": self._config.engine_id, "instance": self._instance, "model": self._model,
            "block_size": cache.block_size, "num_blocks": cache.num_gpu_blocks, "timeout_s": self._config.timeout_s,
            "capabilities": self._capabilities,
        }  # fmt: skip

    @property
    def address(self) -> str:
        """host:port of its control connections; empty until `run` has begun."""
        return self._address

    # ---- the engine's life

    async def run(self, answers: asyncio.Queue, runnable: Any) -> None:
        """Serve until the engine ends. `answers`, `runnable`: as LMDeploy gives them to its migration loop."""
        try:
            with self._ending_with_it():
                await self._open()
                await asyncio.get_running_loop().create_future()
        finally:
            await self._until_ended()

    @contextlib.contextmanager
    def _ending_with_it(self) -> Any:
        """End the process of a server with an error: its other process does not check this loop, and sees that end."""
        try:
            yield
        except SageError as error:
            logger.critical("the engine ends: %s", error)
            if self._is_server:
                os._exit(1)
            raise

    async def _open(self) -> None:
        """Raises ConfigError: the port is in use."""
        self._server = ControlServer(self._key, self._handlers(), self._lost)
        self._address = await self._server.start(self._config.control_host, self._config.control_port)

    async def _until_ended(self) -> None:
        # Apart: with each of its tasks that ends LMDeploy cancels this one again.
        ending = asyncio.create_task(self._end())
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(ending)

    async def _end(self) -> None:
        self._watchers.close()
        if self._server is not None:
            await self._server.close()

    # ---- what the scheduler's hooks tell

    def engine_closes(self) -> None:
        """From any thread: LMDeploy ends its workers before it ends `run`."""

    def step_end(self, running: list[Any], step_s: float) -> None:
        """The results of a step, which took so long, are given out."""
        self._watchers.changed()

    def kept(self, seq: Any) -> None:
        """LMDeploy's server is through with a request whose blocks are kept; an engine without a group has none."""

    def ended(self, session_id: int) -> None:
        """A request leaves the engine."""
        self._watchers.changed()

    def queue_changed(self) -> None:
        """A request has come, or has lost its place and waits again."""

    async def wait_for_room(self, may_run: asyncio.Event) -> bool:
        """Whether it was waited for blocks that are kept for others."""
        return False

    # ---- what others ask

    def _handlers(self) -> Mapping[type, Any]:
        return {Hello: self._hello, Subscribe: self._subscribe}

    async def _hello(self, connection: ControlConnection, message: Hello) -> EngineFacts:
        own = self.facts()
        if message.facts is not None and (why := refusal(message.facts, own)):
            raise PeerError(f"{own.engine_id} does not fit {message.engine_id}: {why}.")
        connection.peer = message.engine_id
        return own

    async def _subscribe(self, connection: ControlConnection, _: Subscribe) -> PrefixChange:
        return self._watchers.add(connection)

    def _lost(self, connection: ControlConnection) -> None:
        self._watchers.remove(connection)

    # ---- report

    def report(self) -> dict[str, Any] | None:
        """Return numbers of a group for `/metrics`; None without a group."""
        return None
