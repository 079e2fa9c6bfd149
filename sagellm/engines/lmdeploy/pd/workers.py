"""The KV transfer channels of all workers of an engine, asked as one."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sagellm.comm_backend.kv_transfer.base import (
    KVTransferChannel,
    TransferEndpoint,
    TransferOptions,
    TransferPlan,
    TransferResult,
)
from sagellm.comm_backend.kv_transfer.registry import make_channel
from sagellm.engines.lmdeploy.pd.region import region_of

__all__ = ["Workers"]


class Workers:
    """Of an engine whose worker lives in this process. Every method runs on the engine's loop; what takes time does so on
    threads of its own.

    Raises:
        TransferError: the channel cannot work here.
    """

    def __init__(self, cache_engine: Any, channel: str, options: TransferOptions) -> None:
        self._channel: KVTransferChannel = make_channel(channel, region_of(cache_engine), options)
        self._threads = ThreadPoolExecutor(options.max_running + 1, thread_name_prefix="sagellm-kv")

    def endpoints(self) -> tuple[TransferEndpoint, ...]:
        return (self._channel.endpoint(),)

    def token_bytes(self) -> int:
        return sum(each.layout.token_bytes() for each in self.endpoints())

    async def connect(self, peer: str, endpoints: Sequence[TransferEndpoint]) -> None:
        await self._run(self._channel.connect, peer, endpoints)

    async def disconnect(self, peer: str) -> None:
        await self._run(self._channel.disconnect, peer)

    async def transfer(self, plan: TransferPlan) -> TransferResult:
        return await self._run(self._channel.transfer, plan)

    def cancel(self, transfer_id: str) -> None:
        self._channel.cancel(transfer_id)

    async def checksums(self, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (await self._run(self._channel.checksums, blocks),)

    def report(self) -> dict[str, Any]:
        return self._channel.report()

    def close(self) -> None:
        self._channel.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, call: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
