"""The contract of KV transfer channels: blocks of one engine's pool into blocks of another's, pulled by who wants them.

Each worker of an engine (each rank) has one channel over its own KV blocks. Its `endpoint` is told to peers; who has connected
to the endpoints of all ranks of a peer can read that peer's blocks. The owner is not asked for each transfer. It keeps
the blocks unchanged until it hears that they were read, and reports it if it could not. So what was read counts only once the
owner has confirmed that it still held the blocks; that is its engines' business, not the channel's.

This class has the shared part of all channels: checks of plans, turns of transfers, conversion of layouts, checksums. A
channel defines how it is reached (`_open`, `_connect`) and how bytes come over (`_read`).
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import torch

from sagellm.comm_backend.kv_transfer.checks import check_blocks, check_covered, check_equal
from sagellm.comm_backend.kv_transfer.conversion import Conversion, Pieces, Tokens, fit
from sagellm.comm_backend.kv_transfer.copying import Reader, block_checksums
from sagellm.comm_backend.kv_transfer.layout import KVRegion, Model
from sagellm.comm_backend.kv_transfer.plan import (
    TransferEndpoint,
    TransferOptions,
    TransferPlan,
    TransferResult,
    parsed,
)
from sagellm.comm_backend.kv_transfer.turns import Run, Turns
from sagellm.core.errors import SageError, TransferCancelled, TransferError, TransferTimeoutError

__all__ = ["KVTransferChannel", "Read", "TransferEndpoint", "TransferOptions", "TransferPlan", "TransferResult"]

CLOSE_S = 10.0  # for transfers to notice that the channel closes


class Read(NamedTuple):
    """Bytes of one part of one rank of a peer, to be read into `target`.

    `target`: a part's tensor of the own region, or a contiguous tensor on the CPU that is new to the channel.
    """

    pieces: Pieces
    target: torch.Tensor


class _Peer(NamedTuple):
    endpoints: tuple[TransferEndpoint, ...]
    conversions: dict[int, Conversion]  # by rank; those that nothing is read from are not there
    links: dict[int, Any]


class KVTransferChannel(ABC):
    """One worker's end. All methods may be called from any thread, `transfer` from several at once.

    Args:
        region: the own KV blocks.

    Raises:
        TransferError: it cannot work here; bad options; memory that it cannot serve.
    """

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)
    converts: ClassVar[bool] = True  # between block sizes and TP degrees
    checks_key: ClassVar[bool] = False  # whether who does not know `TransferOptions.key` is not served
    Options: ClassVar[type[Model]] = Model  # what it takes as `TransferOptions.options`

    # ---- what a channel defines

    @classmethod
    @abstractmethod
    def missing(cls) -> str:
        """Return what it needs and does not find here; empty if it can work."""

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for KV blocks as this channel wants it; not initialized. `shape` as `KVLayout.shape`."""
        return torch.empty(tuple(shape), dtype=dtype)

    @abstractmethod
    def _open(self) -> dict[str, Any]:
        """Make `self.region` readable for peers, by `self.options` and `self.own_options`. Returns `TransferEndpoint.address`.
        It ends what it has begun before it raises."""

    @abstractmethod
    def _connect(self, endpoint: TransferEndpoint, deadline: float) -> Any:
        """A link to one rank of a peer, whose layout fits. `deadline`: of `time.monotonic()`.

        Raises:
            TransferError, TransferTimeoutError: as `connect`.
        """

    @abstractmethod
    def _read(self, link: Any, reads: Sequence[Read], run: Run) -> None:
        """Copy these bytes; several threads may do so over one link. Between chunks of at most a millisecond `run.check()`
        is called, or a blocking call ends at `run.deadline` and by `run.woken_by`; nothing is written after it has raised.

        Raises:
            TransferError: the peer has gone, or refuses. Where it may have gone while it was read: afterwards too.
        """

    def _read_tokens(self, link: Any, conversion: Conversion, tokens: Tokens, run: Run) -> None:
        """Copy these tokens into own blocks; nothing else is written. As `_read`, which it calls."""
        tensors = self.region.tensors
        for some in conversion.pieces(tokens):
            run.check()
            self._read(link, [Read(each, tensors[each.part]) for each in some], run)

    def _disconnect(self, link: Any) -> None:  # noqa: B027 - many have nothing to do
        """Forget it. Transfers that use it were stopped but may not have ended; let what they need live as long."""

    @abstractmethod
    def _close(self) -> None:
        """Stop serving others. No transfer runs any more. Called once, also without a connection."""

    # ---- what its users call

    def __init__(self, region: KVRegion, options: TransferOptions) -> None:
        if missing := self.missing():
            raise TransferError(f"KV channel {self.name} cannot work here: {missing}")
        for part, tensor in zip(region.layout.parts, region.tensors, strict=True):
            if tensor.device.type not in self.device_types:
                known = ", ".join(self.device_types)
                raise TransferError(f"{part.name} is on {tensor.device}; KV channel {self.name} moves what is on {known}.")
        self.region, self.options = region, options
        self.own_options: Any = parsed(self.Options, options.options, f"options of KV channel {self.name}")
        self._turns = Turns(options.max_running)
        self._peers: dict[str, _Peer] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._counts: dict[str, float] = {
            "transfers": 0, "bytes": 0, "seconds": 0.0, "waited_s": 0.0, "failed": 0, "timed_out": 0, "cancelled": 0
        }  # fmt: skip
        self._endpoint = TransferEndpoint(channel=self.name, layout=region.layout, address=self._open())

    def endpoint(self) -> TransferEndpoint:
        return self._endpoint

    def connect(self, peer: str, endpoints: Sequence[TransferEndpoint], *, timeout_s: float = 10.0) -> None:
        """To all ranks of a peer; again, where a peer of this name has come back: what runs from the former one fails.

        Raises:
            TransferError: it cannot be reached or does not know the key, is another channel's, or its layout does not fit;
                names the difference.
            TransferTimeoutError: the deadline has passed.
        """
        if not 0 < timeout_s <= 3600:
            raise TransferError(f"timeout_s is {timeout_s!r}; allowed are more than 0 and up to 3600 seconds.")
        self._check_open()
        for endpoint in endpoints:
            if endpoint.channel != self.name:
                raise TransferError(f"peer {peer} has channel {endpoint.channel}, this one is {self.name}; use the same.")
        layouts = [endpoint.layout for endpoint in endpoints]
        with _of(f"peer {peer}"):
            runs = fit(self.region.layout, layouts)
            if not self.converts:
                check_equal(self.name, self.region.layout, layouts)
            conversions = {
                rank: Conversion(self.region.layout, layouts[rank], [run for run in runs if run.rank == rank])
                for rank in sorted({run.rank for run in runs})
            }
            deadline = time.monotonic() + timeout_s
            links: dict[int, Any] = {}
            try:
                for rank in conversions:
                    links[rank] = self._connect(endpoints[rank], deadline)
            except BaseException:
                self._drop(links)
                raise
        with self._lock:
            is_late, former = self._closed, self._peers.get(peer)
            if not is_late:
                self._peers[peer] = _Peer(tuple(endpoints), conversions, links)
        if is_late:
            self._drop(links)
            self._check_open()
        if former is not None:
            self._turns.leave(former)
            self._drop(former.links)

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its running transfers fail. An unknown one is ignored."""
        with self._lock:
            former = self._peers.pop(peer, None)
        if former is not None:
            self._turns.leave(former)
            self._drop(former.links)

    def transfer(self, plan: TransferPlan) -> TransferResult:
        """Copy, and wait until that is done.

        Raises:
            TransferError: an unknown peer, or one that has gone; a block that one of the two does not have; blocks that do not
                cover the tokens. Checksums that differ, by block; another number of bytes than planned; a name in use.
            TransferTimeoutError: the deadline has passed; nothing is written from then on.
            TransferCancelled: by `cancel`, or by `close`; nothing is written from then on.
        """
        asked = time.monotonic()
        try:
            self._check_open()
            peer = self._peers.get(plan.source)
            if peer is None:
                with self._lock:
                    known = ", ".join(self._peers) or "none"
                raise TransferError(f"peer {plan.source} is unknown; connected are: {known}. Connect to it first.")
            self._check_plan(plan, peer)
            run = Run(plan.transfer_id, plan.source, plan.timeout_s, peer)
            self._turns.begin(run)
            try:
                if self._peers.get(plan.source) is not peer:  # before anybody could stop this run by its link
                    raise TransferError("the peer was disconnected.")
                begun = time.monotonic()
                num_bytes = self._move(plan, peer, run)
                run.check()
                if plan.total_bytes and not plan.checksums and num_bytes != plan.total_bytes:
                    raise TransferError(f"{num_bytes} bytes were moved; the plan has {plan.total_bytes}.")
            except Exception as error:
                _raise_named(error, f"transfer {plan.transfer_id} from {plan.source}")
            finally:
                self._turns.end(run)
            seconds, waited_s = time.monotonic() - begun, begun - asked
        except TransferError as error:
            is_late = isinstance(error, TransferTimeoutError)
            with self._lock:
                self._counts["timed_out" if is_late else "cancelled" if isinstance(error, TransferCancelled) else "failed"] += 1
            raise
        with self._lock:
            counts = self._counts
            counts["transfers"] += 1
            counts["bytes"] += num_bytes
            counts["seconds"] += seconds
            counts["waited_s"] += waited_s
        return TransferResult(num_bytes, seconds, waited_s)

    def cancel(self, transfer_id: str) -> bool:
        """End a transfer that waits or runs; whether there was one. It may return before the transfer has ended."""
        return self._turns.cancel(transfer_id)

    def checksums(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return a checksum of each own block, over the bytes of all parts, and of each part all layers: CRC-32.

        Raises:
            TransferError: a block that is not there.
        """
        self._check_open()
        check_blocks("", blocks, self.region.layout)
        return block_checksums(self.region.tensors, blocks)

    def report(self) -> dict[str, Any]:
        """Counts since the start, for metrics: transfers, bytes, seconds, waited_s, failures by kind, running, peers."""
        with self._lock:
            return {
                "channel": self.name, **self._counts, "running": self._turns.num_running, "waiting": self._turns.num_waiting,
                "peers": len(self._peers),
            }  # fmt: skip

    def close(self) -> None:
        """Cancel what runs, and stop serving others. A second call does nothing."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            peers, self._peers = self._peers, {}
        if was_closed:
            return
        self._turns.close(CLOSE_S)
        for peer in peers.values():
            self._drop(peer.links)
        self._close()

    def __enter__(self) -> "KVTransferChannel":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ----

    def _move(self, plan: TransferPlan, peer: _Peer, run: Run) -> int:
        tokens = Tokens(
            np.array(plan.block_ids, np.int64), plan.source_start, np.array(plan.target_blocks, np.int64), plan.target_start,
            plan.first_token, plan.num_tokens,
        )  # fmt: skip
        num_bytes = 0
        for rank, conversion in peer.conversions.items():
            link = peer.links[rank]
            if plan.checksums:
                reader = self._reader(link, conversion, run)
                num_bytes += reader.checked(tokens, plan.checksums[rank], rank)
            else:
                self._read_tokens(link, conversion, tokens, run)
                num_bytes += plan.num_tokens * conversion.token_bytes
        return num_bytes

    def _reader(self, link: Any, conversion: Conversion, run: Run) -> Reader:
        def read(reads: Sequence[tuple[Pieces, torch.Tensor]]) -> None:
            run.check()
            self._read(link, [Read(*each) for each in reads], run)

        def read_tokens(tokens: Tokens) -> None:
            self._read_tokens(link, conversion, tokens, run)

        return Reader(self.region, conversion, read, read_tokens, run)

    def _check_plan(self, plan: TransferPlan, peer: _Peer) -> None:
        theirs, own = peer.endpoints[0].layout, self.region.layout
        check_blocks(plan.source, plan.block_ids, theirs)
        check_blocks("", plan.target_blocks, own)
        end = plan.first_token + plan.num_tokens
        check_covered(plan.source, plan.block_ids, plan.source_start, theirs, end)
        check_covered("", plan.target_blocks, plan.target_start, own, end)
        if plan.checksums and [len(each) for each in plan.checksums] != [len(plan.block_ids)] * len(peer.endpoints):
            raise TransferError(
                f"checksums are for {[len(each) for each in plan.checksums]} blocks by rank; give one for each of "
                f"{len(plan.block_ids)} blocks on each of {len(peer.endpoints)} ranks, or none."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("the KV channel is closed.")

    def _drop(self, links: Mapping[int, Any]) -> None:
        for link in links.values():
            with suppress(Exception):
                self._disconnect(link)


@contextmanager
def _of(what: str) -> Iterator[None]:
    """Errors say what they are of."""
    try:
        yield
    except Exception as error:
        _raise_named(error, what)


def _raise_named(error: Exception, what: str) -> NoReturn:
    """An error that says what it is of; that of a library that a channel has not mapped becomes a TransferError."""
    if isinstance(error, TransferError):
        if str(error).startswith(what):
            raise error
        raise type(error)(f"{what}: {error}") from error
    if isinstance(error, SageError):
        raise TransferError(f"{what}: {error}") from error
    raise TransferError(f"{what}: {type(error).__name__}: {error}") from error
