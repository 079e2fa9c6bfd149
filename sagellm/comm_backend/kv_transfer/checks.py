"""The blocks of a transfer exist and suffice; a channel that does not convert has equal layouts."""

from collections.abc import Sequence

from sagellm.comm_backend.kv_transfer.layout import KVLayout
from sagellm.core.errors import TransferError

__all__ = ["check_blocks", "check_covered", "check_equal"]


def check_blocks(peer: str, blocks: Sequence[int], layout: KVLayout) -> None:
    """`peer`: whose they are; empty: own ones. Raises TransferError: a block that is not there."""
    if blocks and not (min(blocks) >= 0 and max(blocks) < layout.num_blocks):
        bad = [block for block in blocks if not 0 <= block < layout.num_blocks]
        raise TransferError(f"{_whose(peer)} blocks {bad[:8]} are not there; blocks go from 0 to {layout.num_blocks - 1}.")


def check_covered(peer: str, blocks: Sequence[int], start: int, layout: KVLayout, end: int) -> None:
    """Raises TransferError: blocks that begin with token `start` and end before token `end`."""
    if start + len(blocks) * layout.block_size < end:
        raise TransferError(
            f"{len(blocks)} {_whose(peer)} blocks of {layout.block_size} tokens from token {start} on end before token {end}; "
            "give all blocks of the tokens."
        )


def check_equal(channel: str, own: KVLayout, layouts: Sequence[KVLayout]) -> None:
    """Raises TransferError: names the first difference to those of all ranks of a peer."""
    for what, here, there in (
        ("ranks", own.tp_size, len(layouts)),
        ("tokens a block", own.block_size, layouts[0].block_size),
        ("heads", own.first_head, layouts[min(own.tp_rank, len(layouts) - 1)].first_head),
    ):
        if here != there:
            raise TransferError(f"the layouts differ in {what}: {here} here, {there} there; {channel} does not convert.")


def _whose(peer: str) -> str:
    return f"{peer}'s" if peer else "own"
