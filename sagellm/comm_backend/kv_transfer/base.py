"""The contract of KV transfer channels: blocks of one engine's pool into blocks of another's, pulled by who wants them.

Each worker of an engine (each rank) has one channel over its own KV blocks. Its `endpoint` is told to peers; who has connected
to the endpoints of all ranks of a peer can read that peer's blocks. Nobody is asked for each transfer: whoever owns the blocks
keeps them as they are until it hears that they were read, and says so when it could not. So what was read counts only once the
owner has confirmed that it still held the blocks; that is its engines' business, not the channel's.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator

from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVRegion, Model

__all__ = ["KVTransferChannel", "TransferEndpoint", "TransferOptions", "TransferPlan", "TransferResult"]


class TransferOptions(Model):
    """Of one channel.

    Attributes:
        max_running: transfers at a time; more wait for their turn, which their deadline bounds.
        host: where a channel that listens does so.
        key: shared secret of the group; a channel that listens serves nobody who does not know it.
        options: of the channel, by name.
    """

    max_running: int = Field(default=4, ge=1, le=256)
    host: str = "127.0.0.1"
    key: bytes = b""
    options: dict[str, Any] = Field(default_factory=dict)


class TransferEndpoint(Model):
    """How to reach one rank's KV blocks; it comes from the network, so a channel believes nothing of it unchecked.

    Attributes:
        channel: name of the channel.
        address: what that channel needs, as JSON.
    """

    channel: str
    layout: KVLayout
    address: dict[str, Any]


class TransferPlan(Model):
    """Keys and values of a request's tokens `first_token` to `first_token + num_tokens`, from a peer's blocks into own ones.

    Attributes:
        transfer_id: names it in `cancel` and in messages; of the caller's choice.
        peer: as given to `connect`.
        src_blocks, src_start: the peer's blocks, in the order of the request's tokens, and the token that the first one
            begins with.
        dst_blocks, dst_start: own blocks, likewise.
        timeout_s: deadline, waiting for its turn included.
        checksums: of `src_blocks`, by rank of the peer (`KVTransferChannel.checksums`); empty: nothing is checked.
    """

    transfer_id: str = Field(min_length=1)
    peer: str = Field(min_length=1)
    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]
    first_token: int = Field(default=0, ge=0)
    num_tokens: int = Field(ge=1)
    src_start: int = Field(default=0, ge=0)
    dst_start: int = Field(default=0, ge=0)
    timeout_s: float = Field(gt=0, le=3600)
    checksums: tuple[tuple[int, ...], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "TransferPlan":
        if self.first_token < max(self.src_start, self.dst_start):
            raise ValueError(
                f"first_token is {self.first_token}; the blocks begin with tokens {self.src_start} and {self.dst_start}."
            )
        if len(set(self.dst_blocks)) != len(self.dst_blocks):
            raise ValueError(f"dst_blocks names a block twice: {self.dst_blocks}.")
        return self


class TransferResult(Model):
    """`seconds`: of the copying, `waited_s`: for its turn before that. `num_bytes`: that were written into own blocks."""

    num_bytes: int
    seconds: float
    waited_s: float


class KVTransferChannel(ABC):
    """One worker's end. All methods may be called from any thread, `transfer` from several at once.

    Raises:
        TransferError: it cannot work here; bad options.
    """

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    converts: ClassVar[bool] = True  # between block sizes and TP degrees

    @classmethod
    @abstractmethod
    def missing(cls) -> str:
        """What it needs and does not find here, in words; empty where it can work."""

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for KV blocks as this channel wants it; not initialized. `shape` as `KVLayout.shape`."""
        return torch.empty(tuple(shape), dtype=dtype)

    @abstractmethod
    def __init__(self, region: KVRegion, options: TransferOptions) -> None: ...

    @abstractmethod
    def endpoint(self) -> TransferEndpoint: ...

    @abstractmethod
    def connect(self, peer: str, endpoints: Sequence[TransferEndpoint], *, timeout_s: float = 10.0) -> None:
        """To all ranks of a peer; again, where a peer of this name has come back.

        Raises:
            TransferError: it cannot be reached or does not know the key, is another channel's, or its layout does not fit;
                names the difference.
            TransferTimeoutError: the deadline has passed.
        """

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer; its running transfers fail. An unknown one is none."""

    @abstractmethod
    def transfer(self, plan: TransferPlan) -> TransferResult:
        """Copy, and wait until that is done.

        Raises:
            TransferError: an unknown peer; a block that one of the two does not have; blocks that do not cover the tokens; the
                peer has gone; checksums that differ (names the blocks).
            TransferTimeoutError: the deadline has passed; nothing is written from then on.
            TransferCancelled: by `cancel`, or by `close`; nothing is written from then on.
        """

    @abstractmethod
    def cancel(self, transfer_id: str) -> bool:
        """End a transfer that waits or runs; whether there was one. It may return before the transfer has ended."""

    @abstractmethod
    def checksums(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Of own blocks, one each, over the bytes of all layers and parts."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Counts since the start, for metrics: transfers, bytes, seconds, waited_s, failures by kind, running, peers."""

    @abstractmethod
    def close(self) -> None:
        """Cancel what runs, and stop serving others. A second call does nothing."""
