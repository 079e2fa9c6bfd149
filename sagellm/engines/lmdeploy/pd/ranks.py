"""Worker processes of an engine, each with a KV channel of its own, as the engine's process tells them what to do."""

import asyncio
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from multiprocessing.connection import wait
from typing import Any

from pydantic import BaseModel, ValidationError

from sagellm.comm_backend.control import ControlConnection, connect
from sagellm.comm_backend.kv_transfer.base import TransferEndpoint, TransferPlan, TransferResult
from sagellm.core.config import PDHooks
from sagellm.core.errors import (
    EngineError,
    PeerError,
    PeerTimeoutError,
    SageError,
    TransferCancelled,
    TransferError,
    TransferTimeoutError,
)
from sagellm.engines.lmdeploy.host_memory import cache_engine_of
from sagellm.engines.lmdeploy.pd.rank_messages import (
    RankAnnouncement,
    RankCancel,
    RankChecksums,
    RankConnect,
    RankDisconnect,
    RankReply,
    RankTransfer,
)
from sagellm.engines.lmdeploy.pd.workers import LocalWorker, Workers, options_of

__all__ = ["RemoteWorkers", "ask_ranks", "open_workers"]

logger = logging.getLogger("sagellm")

CALL_S = 20.0  # of what is no transfer; the channel itself has 10 s to connect
SURE_S = 10.0  # beyond a transfer's deadline, to say that nothing is written any more
ERRORS = {"failed": TransferError, "timed_out": TransferTimeoutError, "cancelled": TransferCancelled}


def ask_ranks(executor: Any) -> tuple[list[RankAnnouncement], bytes]:
    """Return the announcements of the workers, by rank, and their key. Nothing may run on them yet.

    Raises:
        TransferError: one of them has no KV channel; in its words.
    """
    from lmdeploy.pytorch.disagg.config import DistServeEngineConfig
    from lmdeploy.pytorch.disagg.conn.protocol import DistServeInitRequest, MigrationProtocol

    key = secrets.token_hex(32)
    unused = DistServeEngineConfig(tp_size=1, ep_size=1, dp_size=1, pp_size=1, dp_rank=0, block_size=1, num_cpu_blocks=0,
                                   num_gpu_blocks=0)  # fmt: skip
    request = DistServeInitRequest(
        local_engine_id="", local_engine_config=unused, remote_engine_id=key, remote_engine_config=unused,
        protocol=MigrationProtocol.TCP,
    )  # fmt: skip
    said = []
    for rank, answer in enumerate(executor.collective_rpc("p2p_initialize", (request,))):
        try:
            one = RankAnnouncement.model_validate_json(answer.endpoint_info)
        except ValidationError as error:
            raise TransferError(f"worker {rank} says what cannot be read of its KV channel: {error}") from None
        if one.error:
            raise TransferError(f"worker {rank}: {one.error}")
        said.append(one)
    return said, key.encode()


class RemoteWorkers(Workers):
    """The workers of an engine with several processes on this host."""

    def __init__(self, channel: str, said: Sequence[RankAnnouncement], key: bytes) -> None:
        self._channel, self._key = channel, key
        self._addresses = [one.control for one in said]
        self._endpoints = tuple(one.endpoint for one in said if one.endpoint is not None)
        assert [(one.layout.tp_rank, one.layout.tp_size) for one in self._endpoints] == [
            (rank, len(said)) for rank in range(len(said))
        ]
        self._connections: list[ControlConnection] = []
        self._on_lost: Callable[[], None] = lambda: None
        self._lost = ""
        self._is_closing = False
        self._tasks: set[asyncio.Task] = set()
        self._peers: set[str] = set()
        self._moving: set[str] = set()
        self._counts: dict[str, float] = {
            "transfers": 0, "bytes": 0, "seconds": 0.0, "waited_s": 0.0, "failed": 0, "timed_out": 0, "cancelled": 0
        }  # fmt: skip

    def endpoints(self) -> tuple[TransferEndpoint, ...]:
        return self._endpoints

    async def start(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        for rank, address in enumerate(self._addresses):
            try:
                connection = await connect(address, self._key)
            except PeerError as error:
                raise TransferError(f"worker {rank} cannot be reached ({error}); is it on another host?") from None
            self._connections.append(connection)
            self._keep(self._watch(rank, connection))

    def check(self) -> None:
        if self._lost:
            raise EngineError(self._lost)

    def may_go(self) -> None:
        self._is_closing = True

    def end_with(self, executor: Any) -> None:
        """This process, which is a server's, ends as soon as one of LMDeploy's workers has; the others follow it. The engine's
        loop may not come to it: LMDeploy waits there, without a limit, until one that was killed takes its next message."""
        processes = [each._proc for each in getattr(executor, "procs", ())]
        if processes:
            threading.Thread(target=self._end_with, args=(processes,), name="sagellm-workers", daemon=True).start()

    def _end_with(self, processes: list[Any]) -> None:
        sentinels = [process.sentinel for process in processes]
        gone = sorted(map(sentinels.index, wait(sentinels)))
        if not self._is_closing:
            logger.critical("the engine ends: worker %s has gone", " and ".join(map(str, gone)))
            os._exit(1)

    async def connect(self, peer: str, endpoints: Sequence[TransferEndpoint]) -> None:
        try:
            await self._all(RankConnect(peer=peer, endpoints=tuple(endpoints)))
        except SageError:
            with contextlib.suppress(SageError):
                await self.disconnect(peer)
            raise
        self._peers.add(peer)

    async def disconnect(self, peer: str) -> None:
        self._peers.discard(peer)
        await self._all(RankDisconnect(peer=peer))

    async def transfer(self, plan: TransferPlan) -> TransferResult:
        try:
            results = [reply.result for reply in await self._move(plan)]
        except TransferError as error:
            self._counts[next(name for name, kind in reversed(ERRORS.items()) if isinstance(error, kind))] += 1
            raise
        result = TransferResult(
            num_bytes=sum(each.num_bytes for each in results), seconds=max(each.seconds for each in results),
            waited_s=max(each.waited_s for each in results),
        )  # fmt: skip
        for name, more in {"transfers": 1, "bytes": result.num_bytes, "seconds": result.seconds,
                           "waited_s": result.waited_s}.items():  # fmt: skip
            self._counts[name] += more
        return result

    def cancel(self, transfer_id: str) -> None:
        for connection in self._connections:
            self._keep(_quietly(connection.call(RankCancel(transfer_id=transfer_id), CALL_S)))

    async def checksums(self, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(reply.checksums for reply in await self._all(RankChecksums(blocks=blocks)))

    def report(self) -> dict[str, Any]:
        return {"channel": self._channel, **self._counts, "running": len(self._moving), "waiting": 0, "peers": len(self._peers)}

    async def close(self) -> None:
        self.may_go()
        await asyncio.gather(*(connection.close() for connection in self._connections))
        for task in self._tasks:
            task.cancel()

    # ----

    async def _move(self, plan: TransferPlan) -> list[RankReply]:
        """Until no rank writes any more. Where one fails the others are stopped."""
        if plan.transfer_id in self._moving:
            raise TransferError(f"transfer {plan.transfer_id} is under way already; each one needs a name of its own.")
        ask = RankTransfer(plan=plan)
        tasks = [
            asyncio.create_task(self._ask(rank, ask, plan.timeout_s + SURE_S, writes=True))
            for rank in range(len(self._addresses))
        ]
        self._moving.add(plan.transfer_id)
        try:
            done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if left:
                self.cancel(plan.transfer_id)
                await asyncio.wait(left)
        except asyncio.CancelledError:  # the engine ends
            self.cancel(plan.transfer_id)
            for task in tasks:
                self._keep(_quietly(task))
            raise
        finally:
            self._moving.discard(plan.transfer_id)
        errors = [task.exception() for task in (*done, *left)]
        for error in errors:  # the first ones first: the others were stopped for them
            if error is not None:
                raise error
        return [task.result() for task in tasks]

    async def _all(self, message: BaseModel) -> list[RankReply]:
        """Raises the first error of any, when all have answered."""
        found = await asyncio.gather(
            *(self._ask(rank, message, CALL_S) for rank in range(len(self._addresses))), return_exceptions=True
        )
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found

    async def _ask(self, rank: int, message: BaseModel, timeout_s: float, writes: bool = False) -> RankReply:
        """`writes`: blocks are written until it replies. Raises TransferError."""
        if rank >= len(self._connections):
            raise TransferError(f"worker {rank} is not connected yet.")
        try:
            reply = await self._connections[rank].call(message, timeout_s, RankReply)
        except PeerError as error:
            if writes and isinstance(error, PeerTimeoutError):
                self._lose(f"worker {rank} does not say whether it still writes into KV blocks: {error}")
            raise TransferError(f"worker {rank}: {error}") from None
        if reply.error:
            raise ERRORS[reply.kind](reply.error)
        return reply

    async def _watch(self, rank: int, connection: ControlConnection) -> None:
        await connection.wait_closed()
        if not self._is_closing:
            self._lose(f"worker {rank} has gone")

    def _lose(self, why: str) -> None:
        if not self._lost:
            self._lost = f"{why}; the engine cannot go on."
            logger.error("%s", self._lost)
            self._on_lost()

    def _keep(self, work: Coroutine) -> None:
        """A task without a waiter; Python would forget it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def open_workers(executor: Any, pd: PDHooks, is_server: bool = False) -> Workers:
    """The engine is built and has not begun: its workers can still be called by their executor. `is_server`: this process ends
    when a worker does.

    Raises:
        ConfigError, TransferError: a worker has no usable key, or the channel cannot work there.
    """
    cache_engine = cache_engine_of(executor)
    if cache_engine is not None:
        return LocalWorker(cache_engine, pd.channel, options_of(pd))
    workers = RemoteWorkers(pd.channel, *ask_ranks(executor))
    if is_server:
        workers.end_with(executor)
    return workers


async def _quietly(work: Awaitable) -> None:
    with contextlib.suppress(SageError):  # that it has gone is noticed elsewhere
        await work
