"""The KV transfer channels of all workers of an engine, asked as one."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from sagellm.comm_backend.control import read_key
from sagellm.comm_backend.kv_transfer.base import TransferEndpoint, TransferOptions, TransferPlan, TransferResult
from sagellm.comm_backend.kv_transfer.registry import make_channel
from sagellm.core.config import PDHooks
from sagellm.engines.lmdeploy.pd.calls import ChannelCalls
from sagellm.engines.lmdeploy.pd.region import region_of

__all__ = ["LocalWorker", "Workers", "options_of"]


class Workers(ABC):
    """Every method runs on the engine's loop; what takes time does so elsewhere."""

    @abstractmethod
    def endpoints(self) -> tuple[TransferEndpoint, ...]:
        """One for each worker, in the order of their ranks."""

    def token_bytes(self) -> int:
        """Return the bytes of a token's keys and values over all workers."""
        return sum(each.layout.token_bytes() for each in self.endpoints())

    @abstractmethod
    async def start(self, on_lost: Callable[[], None]) -> None:
        """To be called once, before any method below. `on_lost`: `check` has something to say.

        Raises:
            TransferError: a worker cannot be reached.
        """

    @abstractmethod
    def check(self) -> None:
        """Raises EngineError: a worker has gone, or does not answer; the engine cannot go on."""

    @abstractmethod
    def may_go(self) -> None:
        """From any thread: the engine ends, and with it its workers; that is no loss."""

    @abstractmethod
    async def connect(self, peer: str, endpoints: Sequence[TransferEndpoint]) -> None:
        """To all workers of a peer. Raises as `KVTransferChannel.connect`; then none of the workers is connected."""

    @abstractmethod
    async def disconnect(self, peer: str) -> None: ...

    @abstractmethod
    async def transfer(self, plan: TransferPlan) -> TransferResult:
        """Bytes are those of all workers, times those of the slowest. Raises as `KVTransferChannel.transfer`; by then no worker
        writes into the blocks any more."""

    @abstractmethod
    def cancel(self, transfer_id: str) -> None: ...

    @abstractmethod
    async def checksums(self, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """By worker. Raises as `KVTransferChannel.checksums`."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """As `KVTransferChannel.report`."""

    @abstractmethod
    async def close(self) -> None: ...


class LocalWorker(Workers):
    """The only worker of an engine, in this process.

    Raises:
        TransferError: the channel cannot work here.
    """

    def __init__(self, cache_engine: Any, channel: str, options: TransferOptions) -> None:
        self._channel = make_channel(channel, region_of(cache_engine), options)
        self._calls = ChannelCalls(self._channel)
        self._cancelling: set[asyncio.Task] = set()

    def endpoints(self) -> tuple[TransferEndpoint, ...]:
        return (self._channel.endpoint(),)

    async def start(self, on_lost: Callable[[], None]) -> None:
        pass  # it is lost with this process

    def check(self) -> None:
        pass

    def may_go(self) -> None:
        pass

    async def connect(self, peer: str, endpoints: Sequence[TransferEndpoint]) -> None:
        await self._calls.run(self._channel.connect, peer, endpoints)

    async def disconnect(self, peer: str) -> None:
        await self._calls.run(self._channel.disconnect, peer)

    async def transfer(self, plan: TransferPlan) -> TransferResult:
        return await self._calls.transfer(plan)

    def cancel(self, transfer_id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._calls.cancel(transfer_id))
        self._cancelling.add(task)  # Python would collect it before it ends
        task.add_done_callback(self._cancelling.discard)

    async def checksums(self, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (await self._calls.run(self._channel.checksums, blocks),)

    def report(self) -> dict[str, Any]:
        return self._channel.report()

    async def close(self) -> None:
        await self._calls.run(self._calls.close)
        for task in self._cancelling:
            task.cancel()
        await asyncio.gather(*self._cancelling, return_exceptions=True)


def options_of(pd: PDHooks) -> TransferOptions:
    """Return the options of each worker's channel. Raises ConfigError: no usable key."""
    return TransferOptions(key=read_key(pd.key_file), host=pd.control_host, options=pd.channel_options)
