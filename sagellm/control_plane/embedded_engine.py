"""An engine of the kind `sagellm` in the manager's own process."""

import asyncio
import contextlib
import logging
import os
from typing import Any

from sagellm.control_plane.base import EngineKind
from sagellm.control_plane.kinds.sagellm import SageLLM
from sagellm.core.tasks import within
from sagellm.serve.embedded import EmbeddedServer, check_embedded

__all__ = ["EmbeddedEngine"]

logger = logging.getLogger("sagellm.control")

LAST_S = 30.0  # for an engine that was told to end at once: the step that runs ends first


class EmbeddedEngine(EngineKind):
    """Opens the engine of another kind on a thread of the manager's process, behind a server on the loopback.

    Args:
        engine: not started; its settings are used.

    Raises:
        ConfigError: settings of an engine that has processes.
    """

    is_ours = True

    def __init__(self, engine: SageLLM) -> None:
        check_embedded(engine.config)
        self.name, self.metrics, self.model, self.device = engine.name, engine.metrics, engine.model, engine.device
        self._config = engine.config
        self._server: EmbeddedServer | None = None
        self._over: asyncio.Future[str]
        self._ended: asyncio.Future[None]

    async def start(self) -> None:
        server = EmbeddedServer(self._config)
        server.start()
        self._server = server
        self._over, self._ended = asyncio.wrap_future(server.over), asyncio.wrap_future(server.ended)
        try:
            await asyncio.wrap_future(server.ready)
        except BaseException:
            await self.stop(0.0)
            raise
        self.url, self.model, self.device = server.life.url, server.life.model, server.life.device

    async def stop(self, grace_s: float = 10.0) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        for at_once, limit_s in ((False, grace_s), (True, LAST_S)):
            server.leave(at_once)
            with contextlib.suppress(asyncio.TimeoutError):
                await within(asyncio.shield(self._ended), limit_s)
                server.join()
                return
        logger.error("the engine in this process goes on, though it was told to end; end the manager")

    async def ended(self) -> str:
        return await asyncio.shield(self._over)

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "place": "manager"}
