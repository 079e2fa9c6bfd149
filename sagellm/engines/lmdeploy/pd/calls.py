"""Call the blocking methods of a KV channel from an event loop."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from sagellm.comm_backend.kv_transfer.base import KVTransferChannel, TransferPlan, TransferResult
from sagellm.core.errors import TransferError

__all__ = ["ChannelCalls"]

AGAIN_S = 0.002  # until a transfer that is to be cancelled has begun, or has ended
END_S = 3.0  # for calls that wait for a peer, when the channel is closed


class ChannelCalls:
    """Each call has a thread of its own: one that waited for a thread of a pool would do so beyond its deadline, and
    `disconnect` behind the very transfers that it ends. So there are as many threads as calls that were asked for and have not
    ended; the channel itself lets only some of the transfers run, and every one of them has a deadline.

    All methods but `close` run on the loop.
    """

    def __init__(self, channel: KVTransferChannel) -> None:
        self.channel = channel
        self._device = channel.region.tensors[0].device
        self._moving: dict[str, asyncio.Future] = {}  # by transfer id
        self._threads: set[threading.Thread] = set()

    async def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """A method of the channel. A cancelled caller does not wait for it. Raises as it does; TransferError: no thread."""
        return await self._start(call, *args)

    async def transfer(self, plan: TransferPlan) -> TransferResult:
        """A cancelled caller cancels the transfer and waits until nothing is written any more.

        Raises:
            TransferError: as `KVTransferChannel.transfer`; no thread for it.
        """
        name = plan.transfer_id
        if name in self._moving:
            raise TransferError(f"transfer {name} is under way already; each one needs a name of its own.")
        ended = self._moving[name] = self._start(self.channel.transfer, plan)
        ended.add_done_callback(lambda _: self._moving.pop(name))
        ended.add_done_callback(asyncio.Future.exception)  # read it, or asyncio complains after the caller left
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            await self.cancel(name)
            raise

    async def cancel(self, transfer_id: str) -> None:
        """Cancel a transfer that was started before. Returns when it has ended; an unknown one has."""
        meant = self._moving.get(transfer_id)
        while meant is not None and not meant.done():  # its thread may not have come to the channel yet
            self.channel.cancel(transfer_id)
            await asyncio.wait([meant], timeout=AGAIN_S)

    def close(self) -> None:
        """Close the channel. When this returns nothing writes into its blocks any more, and no call has a thread, unless it
        waits for a peer for more than `END_S`: then it ends by its own deadline. From any thread."""
        self.channel.close()
        end_s = time.monotonic() + END_S
        for thread in self._threads - {threading.current_thread()}:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _start(self, call: Callable[..., Any], *args: Any) -> asyncio.Future:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def work() -> None:
            found, error = None, None
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # each thread has its own, the first GPU by default
                found = call(*args)
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, ended, found, error)
            del found, error  # the traceback holds this frame

        thread = threading.Thread(target=work, name="sagellm-kv")
        try:
            thread.start()
        except RuntimeError as error:
            raise TransferError(f"no thread for a KV channel: {error}") from None
        self._threads = {thread, *(each for each in self._threads if each.is_alive())}
        return ended


def _settle(ended: asyncio.Future, found: Any, error: BaseException | None) -> None:
    if ended.done():  # the caller left
        return
    if error is None:
        ended.set_result(found)
    else:
        ended.set_exception(error)
