"""The engines of a prefill/decode group: those that the group starts, and those that join it by themselves."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from sagellm.control_plane import probe
from sagellm.control_plane.base import EngineKind
from sagellm.control_plane.child_engine import ChildEngine, needs
from sagellm.control_plane.kinds.sagellm import SageLLM
from sagellm.control_plane.probe import ROUTES, EngineFacts
from sagellm.core.errors import ConfigError
from sagellm.core.ports import listen
from sagellm.core.run_folder import RunFolder
from sagellm.pd.answers import Ending
from sagellm.pd.engine import Engine

__all__ = ["JoiningMember", "Member", "RoleServer", "StartedMember"]

FOLDER = "sagellm-member-"
ENDED_S = 2.0  # from the end of a control connection to that of its process


class Member(EngineKind):
    """An engine of a group. It serves while the group has a control connection to it.

    Args:
        owner: the group.
        role: prefill, decode or hybrid.
    """

    name = SageLLM.name
    metrics = SageLLM.metrics

    def __init__(self, owner: Any, role: str) -> None:
        self._owner, self.role, self.group = owner, role, owner.title
        self._engine: Engine | None = None
        self._silent: asyncio.Future[str]

    async def join(self) -> None:
        """Raises PeerError: it cannot be reached, or is not who it says it is."""
        self._silent = asyncio.get_running_loop().create_future()
        self._engine = await self._owner.peers.join(self.url)
        self.role = self._engine.facts.role

    async def leave(self) -> None:
        self._engine = None
        await self._owner.peers.leave(self.url, "it has ended")
        self._owner.peers.costs.forget(self.url)

    def ending(self) -> Ending:
        return Ending() if self._engine is None else self._engine.hangs

    async def gone(self) -> str:
        """Wait until its control connection has ended, or its engine answers nothing, and return why."""
        assert self._engine is not None
        closed = asyncio.ensure_future(self._engine.connection.wait_closed())
        try:
            await asyncio.wait({closed, self._silent}, return_when=asyncio.FIRST_COMPLETED)
            return self._silent.result() if self._silent.done() else "its control connection has ended."
        finally:
            closed.cancel()

    async def health(self) -> str:
        why = await super().health()
        if not why and (engine := self._engine) is not None:
            why = await self._owner.peers.silence_of(engine)
            if why and not self._silent.done():
                self._silent.set_result(why)
        return why

    async def facts(self) -> EngineFacts:
        """Return what the engine has said over its control connection; a prefill engine answers no one else."""
        assert self._engine is not None
        facts = self._engine.facts
        device, _ = await probe.abilities(self.http, self.url, None)
        tokens = await probe.tokens(self.http, self.url, None, facts.model) if self._engine.decodes else None
        capabilities = facts.capabilities.model_dump(mode="json")
        return EngineFacts((self._engine.info.model,), ROUTES[:2], tokens, device, capabilities)


class RoleServer(ChildEngine):
    """`sagellm serve` with a role, as a process.

    Args:
        role: prefill or decode or hybrid.
        words: the command, before the flags that are set here.
        flags: further ones of `sagellm serve`.
        key: secret of the group.
        port: where it serves, if no other process has the port.
        cores: that it is kept on; empty: all.
        gateway: URL of the manager.
    """

    name = SageLLM.name
    metrics = SageLLM.metrics
    is_local = False

    def __init__(
        self, role: str, words: Sequence[str], flags: Sequence[str], key: bytes, port: int, cores: Sequence[int], gateway: str
    ) -> None:
        self.role, self.cores = role, cores
        self._words, self._flags, self._key, self._port, self._gateway = list(words), list(flags), key, port, gateway
        self._folder = RunFolder(FOLDER)

    def command(self, port: int) -> list[str]:
        return [*self._words, "--role", self.role, "--proxy-url", self._gateway,
                "--pd-key-file", str(self._folder.write_key(self._key)), "--host", self.host, "--port", str(port), "--json",
                *self._flags]  # fmt: skip

    def resources(self) -> dict[str, float]:
        words = [word for flag in self._flags for word in flag.split("=", 1)]
        given = dict(pairwise(words))

        def number(flag: str) -> int:
            value = given.get(flag, "1")
            return int(value) if value.isdecimal() else 1  # the server rejects it in its own words

        return needs(number("--threads"), given.get("--device", ""), number("--tensor-parallel"))

    def take_port(self) -> int:
        """Keep the port, by which the others of the group know the engine, unless another process has it."""
        try:
            listen(self.host, self._port).close()
        except ConfigError:
            self._port = super().take_port()
        return self._port

    def on_ready(self, line: dict[str, Any]) -> None:
        self.device = line.get("device", self.device)

    async def stop(self, grace_s: float = 10.0) -> None:
        await super().stop(grace_s)
        self._folder.remove()


class StartedMember(Member):
    """An engine that the group starts.

    Args:
        made: makes its `RoleServer`, or a place for one on a cluster. Called once the manager has an address.
    """

    is_ours = True
    _process: EngineKind

    def __init__(self, owner: Any, role: str, made: Callable[[], EngineKind]) -> None:
        super().__init__(owner, role)
        self._made = made

    def attach(self, fleet: Any, name: str) -> None:
        super().attach(fleet, name)
        self._process = self._made()
        self._process.attach(fleet, name)

    async def start(self) -> None:
        await self._process.start()
        self.url, self.device, self.node = self._process.url, self._process.device, self._process.node
        try:
            await self.join()
        except BaseException:
            await self.reset()
            raise

    async def stop(self, grace_s: float = 10.0) -> None:
        await self.leave()
        await self._process.stop(grace_s)

    async def reset(self) -> None:
        await self.leave()
        await self._process.reset()

    async def ended(self) -> str:
        ended, gone = asyncio.ensure_future(self._process.ended()), asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait({ended, gone}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended}, timeout=0.0 if self._silent.done() else ENDED_S)  # its last words say more
            return ended.result() if ended.done() else gone.result()
        finally:
            ended.cancel()
            gone.cancel()
            await asyncio.gather(ended, gone, return_exceptions=True)

    def describe(self) -> dict[str, Any]:
        return self._process.describe()


class JoiningMember(Member):
    """An engine that somebody else has started, on this machine or another one. It is not ended with the manager.

    Args:
        url: of its server.
    """

    is_ours = False

    def __init__(self, owner: Any, role: str, url: str) -> None:
        super().__init__(owner, role)
        self.url = url

    async def start(self) -> None:
        await self.join()

    async def stop(self, grace_s: float = 10.0) -> None:
        await self.leave()

    async def ended(self) -> str:
        return await self.gone()
