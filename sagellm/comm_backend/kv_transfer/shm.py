"""KV blocks that other processes of this host read where they lie: one copy, no messages."""

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from sagellm.comm_backend.kv_transfer.base import KVTransferChannel, Read
from sagellm.comm_backend.kv_transfer.conversion import Conversion, Tokens
from sagellm.comm_backend.kv_transfer.copying import as_bytes, copy_bytes
from sagellm.comm_backend.kv_transfer.layout import Model
from sagellm.comm_backend.kv_transfer.plan import TransferEndpoint, parsed
from sagellm.comm_backend.kv_transfer.shared_memory import (
    HEADER_BYTES,
    Owner,
    SharedMemory,
    memory_of,
    open_memory,
    words,
)
from sagellm.comm_backend.kv_transfer.turns import Run
from sagellm.core.errors import TransferError

__all__ = ["ShmChannel"]

_OPEN, _CLOSED = 1, 2
_STATE_BYTES = 8


class Segment(Model):
    """`num_bytes`: of the whole. `offset`: where the part's tensor begins."""

    fd: int = Field(ge=0)
    token: int
    num_bytes: int = Field(ge=HEADER_BYTES, le=1 << 48)
    offset: int = Field(default=HEADER_BYTES, ge=0, le=1 << 48)


class Address(Model):
    """`state`: a segment with one word that says whether the channel is open. `parts`: in the order of the layout."""

    pid: int = Field(ge=1, lt=1 << 31)
    state: Segment
    parts: tuple[Segment, ...]


class _Link(NamedTuple):
    owner: Owner
    state: np.ndarray  # int64 [1]
    parts: tuple[np.ndarray, ...]  # uint8 [n], each part's tensor

    def check(self) -> None:
        """Behind a copy and not before it: the memory is there even where its owner has gone. Raises TransferError."""
        if not self.owner.is_alive():
            raise TransferError(f"process {self.owner.pid}, which owns the blocks, has gone.")
        if self.state[0] != _OPEN:
            raise TransferError(f"process {self.owner.pid} has closed its channel.")


class ShmChannel(KVTransferChannel):
    """Processes of one user on one host, over memory that they share; one copy. KV blocks have to be made by `empty`."""

    name = "shm"

    @classmethod
    def missing(cls) -> str:
        is_here = sys.platform.startswith("linux") and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")
        return "" if is_here else f"it needs Linux 5.3 and its memfd and pidfd; this is {sys.platform}. Take tcp."

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeros in shared memory of their own, which lives as long as the tensor or a view of it."""
        return SharedMemory.tensor(tuple(shape), dtype)

    def _open(self) -> dict[str, Any]:
        parts = []
        for part, tensor in zip(self.region.layout.parts, self.region.tensors, strict=True):
            found = memory_of(tensor)
            if found is None:
                raise TransferError(
                    f"{part.name} lies in memory that no other process can read; make them by ShmChannel.empty, or take tcp."
                )
            memory, offset = found
            parts.append(Segment(fd=memory.fd, token=memory.token, num_bytes=len(memory), offset=offset))
        self._own = tuple(as_bytes(tensor) for tensor in self.region.tensors)
        self._state = SharedMemory.create(_STATE_BYTES)
        words(self._state)[0] = _OPEN
        state = Segment(fd=self._state.fd, token=self._state.token, num_bytes=len(self._state))
        return Address(pid=os.getpid(), state=state, parts=tuple(parts)).model_dump(mode="json")

    def _connect(self, endpoint: TransferEndpoint, deadline: float) -> _Link:
        address = parsed(Address, endpoint.address, "address of the peer")
        sizes = [endpoint.layout.num_bytes(part) for part in endpoint.layout.parts]
        if len(address.parts) != len(sizes):
            raise TransferError(f"address of the peer: {len(address.parts)} segments for {len(sizes)} parts.")
        owner = Owner(address.pid)  # first: what is opened next is of this process, or has not the token
        parts = []
        for segment, size in zip(address.parts, sizes, strict=True):
            memory = open_memory(address.pid, segment.fd, segment.token, segment.num_bytes)
            if not HEADER_BYTES <= segment.offset <= segment.num_bytes - size:
                raise TransferError(f"address of the peer: {size} bytes from {segment.offset} of {segment.num_bytes}.")
            parts.append(memory[segment.offset : segment.offset + size])
        state = open_memory(address.pid, address.state.fd, address.state.token, address.state.num_bytes)
        link = _Link(owner, state[HEADER_BYTES : HEADER_BYTES + _STATE_BYTES].view(np.int64), tuple(parts))
        link.check()
        return link

    def _read_tokens(self, link: _Link, conversion: Conversion, tokens: Tokens, run: Run) -> None:
        # In one native call; what Python does behind a large copy, with cold caches, costs ten times what it usually does.
        if not conversion.copy(tokens, link.parts, self._own, run.deadline, run.stop_flag):
            run.raise_end()
        link.check()

    def _read(self, link: _Link, reads: Sequence[Read], run: Run) -> None:
        for some, target in reads:
            copy_bytes(some, link.parts[some.part], as_bytes(target), run)
        link.check()

    def _close(self) -> None:
        words(self._state)[0] = _CLOSED  # peers that have it mapped see that
