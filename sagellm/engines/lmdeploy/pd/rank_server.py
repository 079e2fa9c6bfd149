"""A worker process's side of its KV channel: it moves the blocks of its cache engine, as the engine's process tells it.

LMDeploy's executor can call a worker, but not beside a forward pass. It is used once, before there is any: LMDeploy's own way
to ask workers how peers reach them (`p2p_initialize`, a migration backend's `endpoint_info`) brings the address of a control
server, which a thread of this process runs. All else goes over one connection to that.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from sagellm.comm_backend.control import ControlConnection, ControlServer
from sagellm.comm_backend.kv_transfer.base import KVTransferChannel
from sagellm.comm_backend.kv_transfer.registry import make_channel
from sagellm.core.config import PDHooks
from sagellm.core.errors import SageError, TransferCancelled, TransferTimeoutError
from sagellm.engines.lmdeploy.pd.calls import ChannelCalls
from sagellm.engines.lmdeploy.pd.rank_messages import (
    RankAnnouncement,
    RankCancel,
    RankChecksums,
    RankConnect,
    RankDisconnect,
    RankReply,
    RankTransfer,
)
from sagellm.engines.lmdeploy.pd.region import region_of
from sagellm.engines.lmdeploy.pd.workers import options_of

__all__ = ["HOST", "RankServer", "offer_channel"]

logger = logging.getLogger("sagellm")

HOST = "127.0.0.1"  # the engine's process is on this host
START_S, END_S = 10.0, 3.0
NUMBERS = itertools.count()


class RankServer:
    """Serves the one who has `key`, until that one has gone.

    Raises:
        TransferError: the channel cannot work here.
    """

    def __init__(self, channel: KVTransferChannel, key: bytes) -> None:
        self._channel = channel
        self._calls = ChannelCalls(channel)
        handlers = {
            RankConnect: self._connect, RankDisconnect: self._disconnect, RankTransfer: self._transfer,
            RankCancel: self._cancel, RankChecksums: self._checksums,
        }  # fmt: skip
        self._server = ControlServer(key, handlers, self._left)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sagellm-rank", daemon=True)

    def start(self) -> RankAnnouncement:
        """Raises ConfigError: no port to listen on."""
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(self._server.start(HOST), self._loop)
        return RankAnnouncement(control=starting.result(START_S), endpoint=self._channel.endpoint())

    def close(self) -> None:
        """Transfers that run have ended when this returns. From any thread; a second call does nothing."""
        self._calls.close()
        with contextlib.suppress(RuntimeError):  # closed since
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(END_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._server.close())
        self._loop.close()

    def _left(self, _: ControlConnection) -> None:
        logger.debug("the engine of this worker has gone; its KV blocks are read and written no more")
        threading.Thread(target=self._channel.close, name="sagellm-rank-end", daemon=True).start()

    # ---- what the engine asks

    async def _connect(self, _: ControlConnection, message: RankConnect) -> RankReply:
        return await _reply(self._calls.run(self._channel.connect, message.peer, message.endpoints))

    async def _disconnect(self, _: ControlConnection, message: RankDisconnect) -> RankReply:
        return await _reply(self._calls.run(self._channel.disconnect, message.peer))

    async def _transfer(self, _: ControlConnection, message: RankTransfer) -> RankReply:
        return await _reply(self._calls.transfer(message.plan), lambda result: RankReply(result=result))

    async def _cancel(self, _: ControlConnection, message: RankCancel) -> RankReply:
        return await _reply(self._calls.cancel(message.transfer_id))

    async def _checksums(self, _: ControlConnection, message: RankChecksums) -> RankReply:
        found = self._calls.run(self._channel.checksums, message.blocks)
        return await _reply(found, lambda checksums: RankReply(checksums=checksums))


async def _reply(work: Awaitable, form: Callable[[Any], RankReply] = lambda _: RankReply()) -> RankReply:
    try:
        return form(await work)
    except TransferTimeoutError as error:
        return RankReply(error=str(error), kind="timed_out")
    except TransferCancelled as error:
        return RankReply(error=str(error), kind="cancelled")
    except SageError as error:
        return RankReply(error=str(error))
    except Exception as error:
        logger.exception("a KV channel failed")
        return RankReply(error=f"{type(error).__name__}: {error}")


class _Name(NamedTuple):
    name: str


def offer_channel(cache_engine: Any, pd: PDHooks) -> None:
    """Have LMDeploy's `p2p_initialize` of this cache engine, which is one of several workers', start its server. The id of the
    peer in that request is the key of it."""
    from lmdeploy.pytorch.disagg.backend.backend import MIGRATION_BACKENDS
    from lmdeploy.pytorch.disagg.backend.base import MigrationBackendImpl

    owner = weakref.ref(cache_engine)  # the registry lives as long as the process

    class RankBackend(MigrationBackendImpl):
        """Moves nothing by itself."""

        def p2p_initialize(self, init_request: Any) -> None:
            pass

        def register_memory_region(self, register_mr_request: Any) -> None:
            pass

        def endpoint_info(self, remote_engine_id: str, protocol: Any) -> dict[str, Any]:
            return announce(owner(), pd, remote_engine_id.encode()).model_dump(mode="json")

        def p2p_connect(self, remote_engine_id: str, conn_req: Any) -> None:
            raise NotImplementedError("the workers of a group's engines are connected over their control servers.")

        p2p_migrate = store = load = p2p_connect

    name = f"sage-rank-{next(NUMBERS)}"  # LMDeploy finds a backend by the name of what `migration_backend` is
    MIGRATION_BACKENDS.register_module(name, module=RankBackend)
    cache_engine.cache_config.migration_backend = _Name(name)


def announce(cache_engine: Any, pd: PDHooks, key: bytes) -> RankAnnouncement:
    """Send every error as an answer: an exception here would end this process and the engine's without a message."""
    try:
        server = RankServer(make_channel(pd.channel, region_of(cache_engine), options_of(pd)), key)
        # When LMDeploy lets go of its memory, or else when the process ends, before Python waits for threads.
        Finalize(cache_engine, server.close, exitpriority=10)
        return server.start()
    except Exception as error:
        if not isinstance(error, SageError):
            logger.exception("no KV channel")
        return RankAnnouncement(error=str(error) or type(error).__name__)
