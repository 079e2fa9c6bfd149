"""The other side of the scenarios: a process that owns KV blocks and does as it is told over a pipe."""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import torch

from sagellm.comm_backend.kv_transfer.base import KVTransferChannel, TransferEndpoint, TransferOptions
from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVRegion

__all__ = ["CONTEXT", "KEY", "OwnerProcess", "OwnerStarter", "filled", "make_region"]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])
FORK = multiprocessing.get_context("fork")
KEY = b"the key of the contract"
ANSWER_S, END_S = 30.0, 5.0


def filled(layout: KVLayout, seed: int) -> tuple[torch.Tensor, ...]:
    """Contents of the blocks of a layout, as bytes [layers, blocks, block_size, heads, width in bytes]. All ranks of a
    model have
    the same bytes where they have the same head."""
    tensors = []
    for number, part in enumerate(layout.parts):
        random = torch.Generator().manual_seed(seed * 100 + number)
        width = part.width * getattr(torch, part.dtype).itemsize
        shape = (layout.num_layers, layout.num_blocks, layout.block_size, layout.total_heads, width)
        whole = torch.randint(1, 256, shape, dtype=torch.uint8, generator=random)
        tensors.append(whole[:, :, :, layout.first_head : layout.first_head + part.num_heads].contiguous())
    return tuple(tensors)


def make_region(kind: type[KVTransferChannel], layout: KVLayout, seed: int | None) -> KVRegion:
    """`seed`: as of `filled`; None: zeros."""
    tensors = tuple(kind.empty(layout.shape(part), getattr(torch, part.dtype)) for part in layout.parts)
    for number, tensor in enumerate(tensors):
        tensor.view(torch.uint8).copy_(filled(layout, seed)[number]) if seed is not None else tensor.zero_()
    return KVRegion(layout, tensors)


class OwnerStarter:
    """Starts processes of owners, by forks of one that has no threads and has loaded the libraries.

    A scenario runs in a process of its own. A fork server that it starts would load the libraries again, in each scenario.
    """

    def __init__(self) -> None:
        self.pipe, there = CONTEXT.Pipe()  # the process that has this end starts owners
        self._process = CONTEXT.Process(target=_start_owners, args=(there,), name="kv-owners")
        self._process.start()
        there.close()

    def __enter__(self) -> "OwnerStarter":
        return self

    def __exit__(self, *exc: Any) -> None:
        """End the owners."""
        with suppress(OSError):
            self.pipe.send(None)
        self.pipe.close()
        self._process.join(END_S)
        self._process.kill()  # a scenario that was killed may have left half of a message
        self._process.join()


class OwnerProcess:
    """A channel in a process of its own. Raises RuntimeError: it could not be built.

    Args:
        starter: pipe of an `OwnerStarter`.
    """

    def __init__(
        self, starter: Connection, kind: type[KVTransferChannel], layout: KVLayout, seed: int, options: dict[str, Any],
        key: bytes = KEY,
    ) -> None:  # fmt: skip
        self._starter, self._is_killed = starter, False
        starter.send((kind, layout, seed, options, key))
        self._pid = starter.recv()
        self._pipe = Connection(recv_handle(starter))
        try:
            self.endpoint = TransferEndpoint.model_validate_json(self._answer())
        except BaseException:
            self.kill()
            raise

    def checksums(self, blocks: Sequence[int]) -> tuple[int, ...]:
        return self._ask("checksums", tuple(blocks))

    def fill(self, seed: int) -> None:
        self._ask("fill", seed)

    def close_channel(self) -> None:
        self._ask("close", None)

    def kill(self) -> None:
        """SIGKILL; returns when it has gone."""
        if self._is_killed:
            return
        self._is_killed = True
        os.kill(self._pid, signal.SIGKILL)
        self._starter.send(self._pid)
        self._starter.recv()
        self._pipe.close()

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still."""
        os.kill(self._pid, signal.SIGSTOP)
        status = Path(f"/proc/{self._pid}/stat")  # it is no child of this process
        while status.read_text().rpartition(")")[2].split()[0] not in "Tt":
            time.sleep(1e-3)

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def _ask(self, what: str, value: Any) -> Any:
        self._pipe.send((what, value))
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise RuntimeError(f"the owner's process said nothing for {ANSWER_S:g} s")
        try:
            is_fine, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the owner's process has died") from None
        if not is_fine:
            raise RuntimeError(f"in the owner's process: {value}")
        return value


def _start_owners(pipe: Connection) -> None:
    """Start an owner for each message, or wait for the end of one, until the message is None or the pipe is closed."""
    torch.set_num_threads(1)
    owners: dict[int, Any] = {}
    with suppress(EOFError, OSError):
        while (wish := pipe.recv()) is not None:
            if isinstance(wish, int):
                owners.pop(wish).join()
                pipe.send(None)
                continue
            here, there = FORK.Pipe()
            owner = FORK.Process(target=_own, args=(there, (pipe, here), *wish))
            owner.start()
            there.close()
            owners[owner.pid] = owner
            pipe.send(owner.pid)
            send_handle(pipe, here.fileno(), None)
            here.close()
    for owner in owners.values():
        owner.kill()
        owner.join()


def _own(
    pipe: Connection, others: Sequence[Connection], kind: type[KVTransferChannel], layout: KVLayout, seed: int, options: dict,
    key: bytes,
) -> None:  # fmt: skip
    """`others`: pipes of the process that this one was forked from."""
    for other in others:
        other.close()
    try:
        region = make_region(kind, layout, seed)
        channel = kind(region, TransferOptions(key=key, options=options))
        pipe.send((True, channel.endpoint().model_dump_json()))
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return
    with suppress(EOFError, OSError):
        while True:
            what, value = pipe.recv()
            try:
                pipe.send((True, _do(channel, what, value)))
            except Exception as error:
                pipe.send((False, f"{type(error).__name__}: {error}"))


def _do(channel: KVTransferChannel, what: str, value: Any) -> Any:
    if what == "checksums":
        return channel.checksums(value)
    if what == "fill":
        for tensor, wanted in zip(channel.region.tensors, filled(channel.region.layout, value), strict=True):
            tensor.view(torch.uint8).copy_(wanted)
        return None
    return channel.close()
