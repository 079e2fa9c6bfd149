"""Reads of a peer's memory by a library that cannot take a read back once it has been given one.

Such a read may end long after a deadline, when a peer that stood still goes on, and writes then. So nothing is ever read into
KV blocks: it is read into memory of our own, and copied from there while the transfer still wants it. Memory that reads are
under way into is not used again before they have ended.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from sagellm.comm_backend.kv_transfer.base import KVTransferChannel, Read
from sagellm.comm_backend.kv_transfer.conversion import Pieces
from sagellm.comm_backend.kv_transfer.copying import as_bytes, copy_bytes
from sagellm.comm_backend.kv_transfer.endpoint_proof import check_proof, proof_of
from sagellm.comm_backend.kv_transfer.layout import Model
from sagellm.comm_backend.kv_transfer.plan import TransferEndpoint, parsed
from sagellm.comm_backend.kv_transfer.turns import Run
from sagellm.core.errors import TransferError

__all__ = ["RemoteReads", "Span", "StagedChannel", "Staging"]

SLOT_BYTES = 256 * 1024  # copying it takes a tenth of a millisecond, after which a stop is noticed
NUM_SLOTS = 16  # under way at once, of one transfer
SLOT_SPANS = 16
GAP_BYTES = 4096  # bytes between two pieces that are read with them: less than what another request costs
MAX_STRAY = 32  # transfers given up whose reads are still under way: 128 MiB
POLL_S = 5e-5


class Span(NamedTuple):
    """`num_bytes` in a row: from `src`, an address in the peer's process, to `dst`, one in this process."""

    src: int
    dst: int
    num_bytes: int


class RemoteReads(ABC):
    """A library's reads from one process of a peer; several threads at once. Only the first one for a peer may block."""

    @abstractmethod
    def submit(self, spans: Sequence[Span]) -> Any:
        """Begin to read; gives a ticket. Raises TransferError: nothing was begun."""

    @abstractmethod
    def poll(self, ticket: Any) -> bool:
        """Whether all of it has arrived. Raises TransferError: it has failed, and nothing is written from now on."""


class _Fill(NamedTuple):
    """Work of a slot at a time: spans, whose `dst` counts from the slot's begin, and pieces of them for a target."""

    spans: list[Span]
    pieces: Pieces
    target: np.ndarray


class _Slot:
    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.reads: RemoteReads | None = None  # while something is under way
        self._ticket: Any = None
        self._fill: _Fill | None = None

    def begin(self, reads: RemoteReads, fill: _Fill) -> None:
        address = self.memory.ctypes.data
        self._ticket = reads.submit([Span(span.src, address + span.dst, span.num_bytes) for span in fill.spans])
        self.reads, self._fill = reads, fill

    def poll(self) -> bool:
        """As that of the reads; once the read has ended, in whatever way, nothing is under way."""
        assert self.reads is not None
        try:
            is_done = self.reads.poll(self._ticket)
        except TransferError:
            self.reads = None
            raise
        if is_done:
            self.reads = None
        return is_done

    def copy_out(self, run: Run) -> None:
        fill, self._fill = self._fill, None
        assert fill is not None
        copy_bytes(fill.pieces, self.memory, fill.target, run)


class _Slots:
    """Staging slots of one transfer."""

    def __init__(self) -> None:
        self.memory = np.zeros(SLOT_BYTES * NUM_SLOTS, np.uint8)
        self.slots = [_Slot(part) for part in self.memory.reshape(NUM_SLOTS, SLOT_BYTES)]

    def has_ended(self) -> bool:
        """Whether no read is under way any more."""
        for slot in self.slots:
            if slot.reads is not None:
                with suppress(TransferError):
                    slot.poll()
        return all(slot.reads is None for slot in self.slots)


class Staging:
    """Staging memory of one channel. Any thread, several at once.

    Args:
        prepare: called with memory (uint8 [n]) before it is read into for the first time.
    """

    def __init__(self, prepare: Callable[[np.ndarray], None] = lambda memory: None) -> None:
        self._prepare = prepare
        self._lock = threading.Lock()
        self._free: list[_Slots] = []
        self._stray: list[_Slots] = []

    @property
    def num_stray(self) -> int:
        """Transfers that were given up with reads under way which have not ended since."""
        with self._lock:
            self._reap()
            return len(self._stray)

    def read(self, reads: RemoteReads, bases: Sequence[int], wanted: Sequence[Read], run: Run) -> None:
        """Read, and copy to where it is wanted; nothing is written there after `run` was stopped.

        Args:
            bases: addresses of the peer's parts.

        Raises:
            TransferError: a read failed, or too many that were given up are still under way; what `run.check` raises.
        """
        slots = self._take()
        try:
            _read(slots.slots, reads, _fills(bases, wanted), run)
        finally:
            with self._lock:
                (self._free if slots.has_ended() else self._stray).append(slots)

    def close(self) -> None:
        """Let memory go, once the library does not write any more."""
        with self._lock:
            self._free, self._stray = [], []

    def _take(self) -> _Slots:
        with self._lock:
            self._reap()
            if self._free:
                return self._free.pop()
            if len(self._stray) >= MAX_STRAY:
                raise TransferError(
                    f"reads of {MAX_STRAY} transfers that were given up are still under way, because a peer stands still; "
                    "wait until it goes on, or end it."
                )
        slots = _Slots()
        self._prepare(slots.memory)
        return slots

    def _reap(self) -> None:
        ended = [slots for slots in self._stray if slots.has_ended()]
        self._stray = [slots for slots in self._stray if slots not in ended]
        self._free += ended


class StagedChannel(KVTransferChannel):
    """A channel whose reads go through `_staging`. A link has `reads` and `bases`, addresses of the peer's parts.

    Attributes:
        Address: model of its addresses, with `bases` and `proof`.
    """

    Address: ClassVar[type[Model]]
    _staging: Staging

    def _proved(self, address: dict[str, Any]) -> dict[str, Any]:
        """Return the address with a proof of the group's key."""
        return {**address, "proof": proof_of(self.options.key, self.name, self.region.layout, address)}

    def _address_of(self, endpoint: TransferEndpoint) -> Any:
        """Return the address of a peer that has the key. Raises TransferError: it has not, or its address makes no sense."""
        check_proof(self.options.key, self.name, endpoint.layout, endpoint.address)
        address: Any = parsed(self.Address, endpoint.address, "address of the peer")
        if len(address.bases) != len(endpoint.layout.parts):
            raise TransferError(f"address of the peer: {len(address.bases)} memories for {len(endpoint.layout.parts)} parts.")
        return address

    def _first_bytes(self, reads: RemoteReads, address: int, count: int, peer: str, deadline: float) -> bytes:
        """Read bytes of a peer that was just found."""
        zero, found = np.zeros(1, np.int64), torch.zeros(count, dtype=torch.uint8)
        run = Run("connect", peer, deadline - time.monotonic())
        self._staging.read(reads, [address], [Read(Pieces(0, zero, zero, zero + count), found)], run)
        return found.numpy().tobytes()

    def _read(self, link: Any, reads: Sequence[Read], run: Run) -> None:
        self._staging.read(link.reads, link.bases, reads, run)


def _read(slots: Sequence[_Slot], reads: RemoteReads, fills: Iterator[_Fill], run: Run) -> None:
    is_more = True
    while True:
        has_moved = False
        for slot in slots:
            if slot.reads is not None:
                if not slot.poll():
                    continue
                slot.copy_out(run)
                has_moved = True
            if is_more:
                run.check()
                fill = next(fills, None)
                if fill is None:
                    is_more = False
                else:
                    slot.begin(reads, fill)
        if not is_more and all(slot.reads is None for slot in slots):
            return
        run.check()
        if not has_moved:
            time.sleep(POLL_S)


def _fills(bases: Sequence[int], wanted: Sequence[Read]) -> Iterator[_Fill]:
    """Pieces that lie close together at the peer are read as one, what lies between them included: a request for each would
    take far longer where heads are split among ranks."""
    for pieces, target in wanted:
        base, memory = bases[pieces.part], as_bytes(target)
        spans: list[Span] = []
        cuts: list[tuple[int, int, int]] = []  # in the slot, at the target, bytes
        used = 0
        for src, dst, num_bytes in zip(*(each.tolist() for each in _cut(pieces)), strict=True):
            end = spans[-1].src + spans[-1].num_bytes - base if spans else 0
            is_near = bool(spans) and 0 <= src - end <= GAP_BYTES
            more = src + num_bytes - end if is_near else num_bytes
            if spans and (used + more > SLOT_BYTES or (not is_near and len(spans) == SLOT_SPANS)):
                yield _fill(spans, pieces.part, cuts, memory)
                spans, cuts, used, is_near, more = [], [], 0, False, num_bytes
            if is_near:
                spans[-1] = spans[-1]._replace(num_bytes=spans[-1].num_bytes + more)
            else:
                spans.append(Span(base + src, used, num_bytes))
            used += more
            cuts.append((used - num_bytes, dst, num_bytes))
        if spans:
            yield _fill(spans, pieces.part, cuts, memory)


def _fill(spans: list[Span], part: int, cuts: list[tuple[int, int, int]], target: np.ndarray) -> _Fill:
    src, dst, num_bytes = (np.array(each, np.int64) for each in zip(*cuts, strict=True))
    return _Fill(spans, Pieces(part, src, dst, num_bytes), target)


def _cut(pieces: Pieces) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`src`, `dst` and sizes of pieces none of which is larger than a slot."""
    counts = -(-pieces.num_bytes // SLOT_BYTES)
    which = np.repeat(np.arange(len(counts)), counts)
    skip = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * SLOT_BYTES
    num_bytes = np.minimum(pieces.num_bytes[which] - skip, SLOT_BYTES)
    return pieces.src[which] + skip, pieces.dst[which] + skip, num_bytes
