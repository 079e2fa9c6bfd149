"""Messages of an engine and its worker processes about their KV channels."""

from typing import Literal

from pydantic import Field

from sagellm.comm_backend.control import register
from sagellm.comm_backend.kv_transfer.layout import Model
from sagellm.comm_backend.kv_transfer.plan import TransferEndpoint, TransferPlan, TransferResult

__all__ = [
    "RankAnnouncement", "RankCancel", "RankChecksums", "RankConnect", "RankDisconnect", "RankReply", "RankTransfer",
]  # fmt: skip


class RankAnnouncement(Model):
    """A worker's first answer to the executor.

    Attributes:
        control: host:port of its control server. `endpoint`: of its KV channel.
        error: why there is neither, in words.
    """

    control: str = ""
    endpoint: TransferEndpoint | None = None
    error: str = ""


class RankConnect(Model):
    peer: str
    endpoints: tuple[TransferEndpoint, ...]


class RankDisconnect(Model):
    peer: str


class RankTransfer(Model):
    plan: TransferPlan


class RankCancel(Model):
    """Cancel a transfer that was sent before. The reply comes when it has ended."""

    transfer_id: str


class RankChecksums(Model):
    blocks: tuple[int, ...]


class RankReply(Model):
    """To each of them. `error`: the words of a TransferError, and `kind` says which one; empty: it was done."""

    error: str = ""
    kind: Literal["failed", "timed_out", "cancelled"] = "failed"
    result: TransferResult | None = None
    checksums: tuple[int, ...] = Field(default=())


register(RankCancel, RankChecksums, RankConnect, RankDisconnect, RankReply, RankTransfer)
