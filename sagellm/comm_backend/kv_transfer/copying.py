"""The copying of one transfer from one rank of a peer: straight into own blocks, or through staging where bytes are checked
that do not lie here as they lie there."""

import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from sagellm._core import copy_pieces
from sagellm.comm_backend.kv_transfer.conversion import Conversion, Pieces, Tokens, block_pieces
from sagellm.comm_backend.kv_transfer.layout import KVRegion
from sagellm.comm_backend.kv_transfer.turns import Run
from sagellm.core.errors import TransferError

__all__ = ["Reader", "as_bytes", "block_checksums", "copy_bytes", "copy_here"]

STAGING_BYTES = 16 << 20


class Reader:
    """One transfer's part that comes from one rank, and is checked.

    Args:
        read: pieces into the tensors beside them.
        read_tokens: into own blocks.
    """

    def __init__(
        self, region: KVRegion, conversion: Conversion, read: Callable[[Sequence[tuple[Pieces, torch.Tensor]]], None],
        read_tokens: Callable[[Tokens], None], run: Run,
    ) -> None:  # fmt: skip
        self._region, self._conversion, self._read, self._read_tokens, self._run = region, conversion, read, read_tokens, run
        self._peer = conversion.peer

    def checked(self, tokens: Tokens, checksums: Sequence[int], rank: int) -> int:
        """Returns the number of bytes.

        Whole blocks with the same layout on both sides are checked in place, after the copy. Other blocks are read into staging
        as a whole, checked there, and the wanted parts are copied from there.
        """
        size, end = self._peer.block_size, tokens.first + tokens.num
        first = tokens.source_start + -(-(tokens.first - tokens.source_start) // size) * size
        last = tokens.source_start + (end - tokens.source_start) // size * size
        if not self._is_same(tokens) or last <= first:
            return self._staged(tokens, checksums, rank)
        self._read_tokens(tokens._replace(first=first, num=last - first))
        num_bytes = (last - first) * self._conversion.token_bytes
        places = range((first - tokens.source_start) // size, (last - tokens.source_start) // size)
        shift = (tokens.source_start - tokens.target_start) // size
        own = [tokens.dst[place + shift] for place in places]
        self._compare(self._region.tensors, own, tokens.src, places, checksums, rank)
        for begin, stop in ((tokens.first, first), (last, end)):
            if begin < stop:
                num_bytes += self._staged(tokens._replace(first=begin, num=stop - begin), checksums, rank)
        return num_bytes

    def _is_same(self, tokens: Tokens) -> bool:
        own, peer = self._region.layout, self._peer
        is_aligned = (tokens.source_start - tokens.target_start) % peer.block_size == 0
        heads = {(run.src_head, run.dst_head) for run in self._conversion.runs}
        return is_aligned and own.block_size == peer.block_size and own.parts == peer.parts and heads == {(0, 0)} and all(
            run.num_heads == own.parts[run.part].num_heads for run in self._conversion.runs
        )

    def _staged(self, tokens: Tokens, checksums: Sequence[int], rank: int) -> int:
        num_bytes = 0
        for places, some in self._in_groups(tokens):
            blocks = tokens.src[places.start : places.stop]
            layout = self._peer.model_copy(update={"num_blocks": len(blocks)})
            staging = [torch.empty(layout.shape(part), dtype=getattr(torch, part.dtype)) for part in layout.parts]
            self._read([(block_pieces(self._peer, number, blocks), each) for number, each in enumerate(staging)])
            self._compare(staging, range(len(blocks)), tokens.src, places, checksums, rank)
            conversion = Conversion(self._region.layout, layout, self._conversion.runs)
            for each in (each for group in conversion.pieces(some) for each in group):
                copy_here(each, staging[each.part], self._region.tensors[each.part], self._run)
            num_bytes += some.num * conversion.token_bytes
        return num_bytes

    def _in_groups(self, tokens: Tokens) -> Iterator[tuple[range, Tokens]]:
        """Places of the peer's blocks that go into staging together, and the tokens in them."""
        size = self._peer.block_size
        step = max(STAGING_BYTES // (self._peer.token_bytes() * size), 1)
        end = tokens.first + tokens.num
        last = -(-(end - tokens.source_start) // size)
        for place in range((tokens.first - tokens.source_start) // size, last, step):
            places = range(place, min(place + step, last))
            begin = tokens.source_start + place * size
            first, stop = max(begin, tokens.first), min(begin + len(places) * size, end)
            src = np.arange(len(places), dtype=np.int64)
            yield places, tokens._replace(src=src, source_start=begin, first=first, num=stop - first)

    def _compare(
        self, tensors: Sequence[torch.Tensor], blocks: Sequence[int], names: np.ndarray, places: range,
        checksums: Sequence[int], rank: int,
    ) -> None:  # fmt: skip
        wrong = []
        for block, place in zip(blocks, places, strict=True):
            self._run.check()
            if block_checksums(tensors, [block])[0] != checksums[place]:
                wrong.append(int(names[place]))
        if wrong:
            raise TransferError(f"checksums of the peer's blocks {wrong[:8]} (rank {rank}) differ from what was read.")


def block_checksums(tensors: Sequence[torch.Tensor], blocks: Sequence[int]) -> tuple[int, ...]:
    """CRC-32 of each block, over [layers, block_size, heads, width] of one tensor after the other."""
    sums = []
    for block in blocks:
        value = 0
        for tensor in tensors:
            value = zlib.crc32(as_bytes(tensor[:, int(block)].contiguous().cpu()), value)
        sums.append(value)
    return tuple(sums)


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """uint8 [n], the same memory. `tensor` is contiguous and on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def copy_here(some: Pieces, source: torch.Tensor, target: torch.Tensor, run: Run) -> None:
    """From one tensor to another; natively where both are on the CPU. Raises as `Run.check`."""
    if target.device.type == source.device.type == "cpu":
        copy_bytes(some, as_bytes(source), as_bytes(target), run)
        return
    here, there = (tensor.reshape(-1).view(torch.uint8) for tensor in (target, source))
    for src, dst, size in zip(some.src.tolist(), some.dst.tolist(), some.num_bytes.tolist(), strict=True):
        run.check()
        here[dst : dst + size].copy_(there[src : src + size])


def copy_bytes(some: Pieces, source: np.ndarray, target: np.ndarray, run: Run) -> None:
    """uint8 [n] both. Other threads run meanwhile. Raises as `Run.check`."""
    if copy_pieces(target, source, some.dst, some.src, some.num_bytes, run.deadline, run.stop_flag) != "done":
        run.raise_end()
