"""Inputs and results of KV transfer channels: options, endpoints, plans, results."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field, ValidationError, model_validator

from sagellm.comm_backend.kv_transfer.layout import KVLayout, Model
from sagellm.core.errors import TransferError

__all__ = ["TransferEndpoint", "TransferOptions", "TransferPlan", "TransferResult", "parsed"]


class TransferOptions(Model):
    """Options of one channel.

    Attributes:
        max_running: transfers at a time; more wait for their turn, which their deadline bounds.
        host: where a channel that listens does so.
        key: shared secret of the group; a listening channel serves only clients that know it.
        options: of the channel, by name.
    """

    max_running: int = Field(default=4, ge=1, le=256)
    host: str = "127.0.0.1"
    key: bytes = b""
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def read(cls, options: "TransferOptions | Mapping[str, Any] | None") -> "TransferOptions":
        """Raises TransferError: invalid options."""
        if isinstance(options, cls):
            return options
        return parsed(cls, dict(options or {}), "options of a KV channel")


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
        source: the peer, as given to `connect`.
        target: the engine that receives, for reports.
        block_ids, source_start: the source's blocks, in the order of the request's tokens, and the token that the first one
            begins with.
        target_blocks, target_start: own blocks, in the same way.
        total_bytes: that the tokens take here; a transfer that moves another number fails. 0: not known.
        timeout_s: deadline, waiting for its turn included.
        checksums: of `block_ids`, by rank of the source (`KVTransferChannel.checksums`); empty: nothing is checked.
    """

    transfer_id: str = Field(min_length=1)
    source: str = Field(min_length=1)
    target: str = ""
    block_ids: tuple[int, ...]
    target_blocks: tuple[int, ...]
    first_token: int = Field(default=0, ge=0)
    num_tokens: int = Field(ge=1)
    source_start: int = Field(default=0, ge=0)
    target_start: int = Field(default=0, ge=0)
    total_bytes: int = Field(default=0, ge=0)
    timeout_s: float = Field(gt=0, le=3600)
    checksums: tuple[tuple[int, ...], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "TransferPlan":
        if self.first_token < max(self.source_start, self.target_start):
            raise ValueError(
                f"first_token is {self.first_token}; the blocks begin with tokens {self.source_start} and {self.target_start}."
            )
        if len(set(self.target_blocks)) != len(self.target_blocks):
            raise ValueError(f"target_blocks names a block twice: {self.target_blocks}.")
        return self


class TransferResult(NamedTuple):
    """`seconds`: of the copying, `waited_s`: for its turn before that. `num_bytes`: that were written into own blocks."""

    num_bytes: int
    seconds: float
    waited_s: float


def parsed(kind: type[Model], values: Mapping[str, Any], what: str) -> Any:
    """The model of these values. Raises TransferError: in one sentence, with the names that are known."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise TransferError(f"{what}: {said}; known are: {', '.join(kind.model_fields) or 'none'}.") from None
