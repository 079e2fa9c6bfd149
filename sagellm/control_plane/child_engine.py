"""An engine that is a process below the manager."""

import asyncio
import logging
import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from sagellm.comm_backend.config import RENDEZVOUS
from sagellm.control_plane.base import EngineKind
from sagellm.core.errors import EngineError
from sagellm.core.ports import free_ports
from sagellm.pd.child import Child

__all__ = ["ChildEngine", "needs"]

logger = logging.getLogger("sagellm.control")

HOST = "127.0.0.1"
POLL_S = 0.2


class ChildEngine(EngineKind):
    """Started on a free port, and ended with the manager, also where that is killed.

    Attributes:
        announces: whether the process prints a JSON line when it is ready. Otherwise its /health is asked.
        ready_timeout_s: longest time to get ready.
        is_local: whether it ignores `host` and `api_key`, so that a cluster has it on the manager's machine alone.
        host: address that its server listens on.
        num_cpus: processor cores that a cluster gives it; None: there is no cluster.
        cores: that the process is kept on; empty: all.
    """

    is_ours = True
    announces = True
    ready_timeout_s = 600.0
    is_local = True
    host = HOST
    num_cpus: int | None = None
    cores: Sequence[int] = ()
    _child: Child | None = None
    _ending: "asyncio.Task[int] | None" = None

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """Return the command that serves on this port of `host`."""

    def variables(self) -> dict[str, str]:
        """Return variables for the environment of the process."""
        return {}

    def resources(self) -> dict[str, float]:
        """Return what it needs of one node of a Ray cluster: resource -> amount."""
        return {"CPU": 1}

    def on_ready(self, line: dict[str, Any]) -> None:
        """Take facts of the readiness line."""

    def take_port(self) -> int:
        """Return a port that is free now."""
        return free_ports(1, self.host)[0]

    async def start(self) -> None:
        port = self.take_port()
        self.url = f"http://[{self.host}]:{port}" if ":" in self.host else f"http://{self.host}:{port}"
        command = self.command(port)
        # The workers of each engine meet at an address of their own, also where the manager was started with one.
        env = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS} | self.variables()
        self._child = Child(f"{self.name}-{port}", command, cores=self.cores, env=env, say=logger.info)
        await self._child.start()
        self._ending = asyncio.create_task(self._child.wait())
        ready = asyncio.create_task(self._ready())
        try:
            await asyncio.wait({ready, self._ending}, timeout=self.ready_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._ending.done():
                raise EngineError(self._child.words(self._ending.result()))
            if not ready.done():
                raise EngineError(f"it is not ready within {self.ready_timeout_s:g} s.")
            self.on_ready(ready.result())
        except BaseException:
            await self.stop(0.0)
            raise
        finally:
            ready.cancel()

    async def _ready(self) -> dict[str, Any]:
        assert self._child is not None
        if self.announces:
            return await asyncio.shield(self._child.ready) or {}
        while True:
            try:
                if not await self.health():
                    return {}
            except asyncio.TimeoutError:
                pass
            await asyncio.sleep(POLL_S)

    async def stop(self, grace_s: float = 10.0) -> None:
        if self._child is None:
            return
        if self._child.is_running:
            await self._child.end(grace_s)
        if self._ending is not None:
            await self._ending
        self._child = self._ending = None

    async def ended(self) -> str:
        assert self._child is not None and self._ending is not None
        child = self._child
        return child.words(await asyncio.shield(self._ending))

    def describe(self) -> dict[str, Any]:
        return {"pid": self._child.pid if self._child is not None else None}


def needs(threads: int, device: str = "", num_workers: int = 1) -> dict[str, float]:
    """Return the resources of so many workers: cores of each, and a device of each where that is no processor."""
    found: dict[str, float] = {"CPU": threads * num_workers}
    if device not in ("", "auto", "cpu"):
        found["GPU" if device == "cuda" else device] = num_workers
    return found
