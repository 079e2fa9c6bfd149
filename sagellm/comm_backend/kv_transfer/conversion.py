"""From a peer's layout to one's own: whether they fit, which rank has which heads, and which bytes go where."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sagellm._core import KVStrides
from sagellm.comm_backend.kv_transfer.layout import KVLayout, KVPart
from sagellm.core.errors import TransferError

__all__ = ["Conversion", "HeadRun", "Pieces", "Tokens", "block_pieces", "fit"]

PIECES = 1 << 18  # of one rank and part that are looked at together; more than that and their lists would need memory


class HeadRun(NamedTuple):
    """`num_heads` heads of a part that lie side by side in a rank of the peer and here."""

    rank: int
    part: int
    src_head: int
    dst_head: int
    num_heads: int


class Pieces(NamedTuple):
    """Bytes that lie in a row on both sides; int64 [n] each: offsets in the peer's tensor and in the own one, and how many."""

    part: int
    src: np.ndarray
    dst: np.ndarray
    num_bytes: np.ndarray


class Tokens(NamedTuple):
    """Tokens `first` to `first + num` of a request lie in `src` and `dst`, blocks whose first token is `*_start`."""

    src: np.ndarray
    source_start: int
    dst: np.ndarray
    target_start: int
    first: int
    num: int


# ---- which heads


def fit(own: KVLayout, peers: Sequence[KVLayout]) -> list[HeadRun]:
    """Return the reads from each rank of a peer that give every head of this rank.

    `peers`: of all ranks, in their order. If several ranks hold a head, ranks of this side read from different ones.

    Raises:
        TransferError: names the first difference that cannot be bridged.
    """
    if not peers:
        raise TransferError("a peer has one endpoint for each of its ranks; none was given.")
    for rank, peer in enumerate(peers):
        if (peer.tp_rank, peer.tp_size) != (rank, len(peers)):
            raise TransferError(
                f"endpoint {rank} of {len(peers)} is that of rank {peer.tp_rank} of {peer.tp_size}; give those of all ranks, "
                "in order."
            )
        _check_same(own, peer, peers[0])
    runs = [run for number, part in enumerate(own.parts) for run in _head_runs(own, peers, number, part)]
    return sorted(runs)


def _check_same(own: KVLayout, peer: KVLayout, first: KVLayout) -> None:
    for what, here, there in (
        ("layers", own.num_layers, peer.num_layers),
        ("KV heads in all", own.total_heads, peer.total_heads),
        ("parts", [part.name for part in own.parts], [part.name for part in peer.parts]),
        *((f"width of {part.name}", part.width, other.width) for part, other in zip(own.parts, peer.parts, strict=False)),
        *((f"dtype of {part.name}", part.dtype, other.dtype) for part, other in zip(own.parts, peer.parts, strict=False)),
        *((f"groups of {part.name}", part.group, other.group) for part, other in zip(own.parts, peer.parts, strict=False)),
    ):
        if here != there:
            raise TransferError(
                f"the layouts differ in {what}: {here} here, {there} at the peer; both need the same model and KV schema."
            )
    if (peer.block_size, peer.num_blocks) != (first.block_size, first.num_blocks):
        raise TransferError(
            f"ranks of the peer differ: {first.num_blocks} blocks of {first.block_size} tokens on rank 0, {peer.num_blocks} of "
            f"{peer.block_size} on rank {peer.tp_rank}; a block has one number on all ranks."
        )


def _head_runs(own: KVLayout, peers: Sequence[KVLayout], number: int, part: KVPart) -> Iterator[HeadRun]:
    head, end = own.first_head, own.first_head + part.num_heads
    while head < end:
        holders = [
            rank for rank, peer in enumerate(peers)
            if peer.first_head <= head < peer.first_head + peer.parts[number].num_heads
        ]  # fmt: skip
        if not holders:
            raise TransferError(f"no rank of the peer has head {head} of {part.name}, which rank {own.tp_rank} here needs.")
        rank = holders[own.tp_rank % len(holders)]
        first, num = peers[rank].first_head, peers[rank].parts[number].num_heads
        num_heads = min(first + num, end) - head
        yield HeadRun(rank, number, head - first, head - own.first_head, num_heads)
        head += num_heads


# ---- which bytes


class Conversion:
    """Which bytes of one rank of a peer, whose `runs` these are, go where. Made once for a peer, for all transfers.

    Attributes:
        token_bytes: that one token is, in all layers.
    """

    def __init__(self, own: KVLayout, peer: KVLayout, runs: Sequence[HeadRun]) -> None:
        self.own, self.peer, self.runs = own, peer, runs
        self.token_bytes = own.num_layers * sum(run.num_heads * _head_bytes(own.parts[run.part]) for run in runs)
        self._group = max(part.group for part in own.parts)
        # At worst a token is a piece in each layer.
        self._step = max(PIECES // own.num_layers // self._group, 1) * self._group
        known: dict[tuple[int, ...], int] = {}  # parts of one geometry have their bytes at the same places
        self._strides: list[KVStrides] = []
        self._of_runs: list[tuple[int, int]] = []  # of each run its part, and which strides
        for run in runs:
            here, there = own.parts[run.part], peer.parts[run.part]
            geometry = (*run[2:], here.num_heads, there.num_heads, _head_bytes(here))
            if geometry not in known:
                known[geometry] = len(self._strides)
                self._strides.append(_strides(own, peer, run))
            self._of_runs.append((run.part, known[geometry]))
        # The parts of each geometry.
        self._parts = [[part for part, number in self._of_runs if number == each] for each in known.values()]

    def pieces(self, tokens: Tokens) -> Iterator[list[Pieces]]:
        """A list, as long as `runs`, for some tokens after the other. Bytes that follow each other on both sides are one piece.

        Raises:
            IndexError: the blocks do not cover the tokens.
        """
        for span in self._spans(tokens):
            found = [strides.pieces(*span) for strides in self._strides]
            yield [Pieces(part, *found[number]) for part, number in self._of_runs]

    def copy(
        self, tokens: Tokens, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], deadline: float, stop: np.ndarray
    ) -> bool:
        """All of `pieces` at once, where both sides are memory of this process; whether it came to its end.

        `sources`, `targets`: uint8 [n], each part's tensor at the peer and here. `deadline`, `stop`: of `_core.copy_pieces`.
        """
        for span in self._spans(tokens):
            for strides, parts in zip(self._strides, self._parts, strict=True):
                here, there = [targets[part] for part in parts], [sources[part] for part in parts]
                if strides.copy_tokens(here, there, *span, deadline, stop) != "done":
                    return False
        return True

    def _spans(self, tokens: Tokens) -> Iterator[tuple[np.ndarray, int, np.ndarray, int, int, int]]:
        group = self._group  # blocks hold whole ones
        end = -(-(tokens.first + tokens.num) // group) * group
        for first in range(tokens.first // group * group, end, self._step):
            yield tokens.src, tokens.source_start, tokens.dst, tokens.target_start, first, min(self._step, end - first)


def _strides(own: KVLayout, peer: KVLayout, run: HeadRun) -> KVStrides:
    head_bytes = _head_bytes(own.parts[run.part])

    def side(layout: KVLayout, head: int) -> tuple[int, int, int, int]:
        token_bytes = layout.parts[run.part].num_heads * head_bytes
        return layout.num_blocks * layout.block_size * token_bytes, layout.block_size, token_bytes, head * head_bytes

    return KVStrides(own.num_layers, side(peer, run.src_head), side(own, run.dst_head), run.num_heads * head_bytes)


def _head_bytes(part: KVPart) -> int:
    return part.width * getattr(torch, part.dtype).itemsize


def _joined(part: int, src: np.ndarray, dst: np.ndarray, num_bytes: np.ndarray) -> Pieces:
    """Neighbours on both sides are one piece."""
    follows = (src[:-1] + num_bytes[:-1] == src[1:]) & (dst[:-1] + num_bytes[:-1] == dst[1:])
    if not follows.any():
        return Pieces(part, src, dst, num_bytes)
    begins = np.flatnonzero(np.concatenate([[True], ~follows]))
    return Pieces(part, src[begins], dst[begins], np.add.reduceat(num_bytes, begins))


def block_pieces(layout: KVLayout, part: int, blocks: np.ndarray) -> Pieces:
    """Whole blocks of a peer's part into a tensor of that layout that has room for these blocks alone."""
    block_bytes = layout.num_bytes(layout.parts[part]) // (layout.num_layers * layout.num_blocks)
    layers = np.arange(layout.num_layers, dtype=np.int64)[:, None]
    src = ((layers * layout.num_blocks + blocks) * block_bytes).reshape(-1)
    dst = ((layers * len(blocks) + np.arange(len(blocks))) * block_bytes).reshape(-1)
    return _joined(part, src, dst, np.full(src.shape, block_bytes))
