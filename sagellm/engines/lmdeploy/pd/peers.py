"""Connections of a decode engine to the prefill engines that compute prompts for it."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sagellm.comm_backend.control import connect
from sagellm.comm_backend.group_messages import EngineFacts, Hello
from sagellm.core.errors import PeerError, SageError

__all__ = ["Peers", "refusal"]

logger = logging.getLogger("sagellm")

LOOK_S = 2.0  # for a server that may have come back


@dataclass(slots=True)
class Peer:
    facts: EngineFacts
    address: str
    connection: Any


class Peers:
    """Every method runs on the engine's loop.

    Args:
        key: of the group.
        link: connects the KV transfer channels of all workers to those of a peer; raises TransferError where they do not fit.
        unlink: disconnects them.
    """

    def __init__(
        self, facts: Callable[[], EngineFacts], key: bytes, link: Callable[[EngineFacts], Any], unlink: Callable[[str], Any]
    ) -> None:
        self._facts, self._key, self._link, self._unlink = facts, key, link, unlink
        self._peers: dict[str, Peer] = {}
        self._introduced: set[str] = set()
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task] = set()

    def names(self) -> list[str]:
        return sorted(self._peers)

    async def find(self, engine_id: str) -> Any:
        """The connection to a peer. Raises PeerError or TransferError if the peer is unknown."""
        peer = await self._find(engine_id)
        if peer is None and engine_id in self._introduced:
            await self.connect(engine_id, await self._address(engine_id))
            peer = await self._find(engine_id)
        if peer is None:
            raise PeerError(f"this engine is not connected to {engine_id}; connected are {self.names() or 'none'}.")
        return peer.connection

    def introduce(self, engine_id: str) -> None:
        """A peer whose return is not announced: LMDeploy's proxy connects two engines once. `find` looks for
        it."""
        self._introduced.add(engine_id)

    async def _find(self, engine_id: str) -> Peer | None:
        async with self._locks.setdefault(engine_id, asyncio.Lock()):
            return self._peers.get(engine_id)

    async def _address(self, engine_id: str) -> str:
        import aiohttp

        from sagellm.comm_backend.group_info import engine_info

        async with aiohttp.ClientSession() as http:
            return (await engine_info(http, engine_id, self._key, LOOK_S)).control

    async def connect(self, engine_id: str, address: str, timeout_s: float = 10.0) -> None:
        """Again where the peer has been started again; nothing where it is connected.

        Raises:
            PeerError: it cannot be reached, does not know the key, or does not fit; names the difference.
            TransferError: its KV blocks cannot be read from here.
        """
        async with self._locks.setdefault(engine_id, asyncio.Lock()):
            known = self._peers.get(engine_id)
            if known is not None and known.address == address and not known.connection.is_closed:
                return
            if known is not None:
                await self._drop(engine_id)
            connection = await connect(address, self._key, timeout_s=timeout_s)
            own = self._facts()
            try:
                facts = await connection.call(Hello(engine_id=own.engine_id, facts=own), timeout_s)
                if facts.engine_id != engine_id:
                    raise PeerError(f"at {address} there is {facts.engine_id}, not {engine_id}.")
                if why := refusal(own, facts):
                    raise PeerError(f"{engine_id} does not fit {own.engine_id}: {why}.")
                await self._link(facts)
            except BaseException:
                await connection.close()
                raise
            self._peers[engine_id] = Peer(facts, address, connection)
            self.keep(asyncio.create_task(self._watch(engine_id, connection)))

    async def drop(self, engine_id: str) -> None:
        async with self._locks.setdefault(engine_id, asyncio.Lock()):
            await self._drop(engine_id)

    async def close(self) -> None:
        for engine_id in list(self._peers):
            await self.drop(engine_id)
        for task in list(self._tasks):
            task.cancel()

    def keep(self, task: asyncio.Task) -> None:
        """A task without a waiter; Python would forget it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, engine_id: str, connection: Any) -> None:
        await connection.wait_closed()
        async with self._locks[engine_id]:
            peer = self._peers.get(engine_id)
            if peer is not None and peer.connection is connection:
                logger.warning("the connection to %s is lost; prompts that it was to compute are computed here", engine_id)
                await self._drop(engine_id)

    async def _drop(self, engine_id: str) -> None:
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            await peer.connection.close()
            with contextlib.suppress(SageError):
                await self._unlink(engine_id)


def refusal(own: EngineFacts, other: EngineFacts) -> str:
    """Why keys and values of one engine are of no use to another; empty if they are."""
    if own.weights != other.weights:
        return f"its model {other.model} has other weights ({other.weights}) than {own.model} here ({own.weights})"
    if own.channel != other.channel:
        return f"it moves KV blocks by {other.channel}, this engine by {own.channel}; give both the same --kv-channel"
    return ""
