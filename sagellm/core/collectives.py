"""Collectives of an engine, as hooks see them."""

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["GROUP", "MAX_PIECES", "CommDecision", "CommOp", "CommRequest"]

GROUP = "group"  # the engine's own process group, as a backend's name
MAX_PIECES = 2


@dataclass(frozen=True, slots=True)
class CommOp:
    """One collective on one rank.

    Attributes:
        num_bytes: size of the given tensor, not of the traffic.
        duration_s: seconds on the device, the wait for the slowest rank included; None in `comm_begin`, or if not measured.
    """

    name: str
    num_bytes: int
    dtype: str
    rank: int
    world_size: int
    async_op: bool
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class CommRequest:
    """Collectives of one sort, before the first one.

    Attributes:
        name: function of torch.distributed, such as all_reduce.
        num_bytes: size of a rank's tensor, rounded up to a power of two.
        dtype: type of its numbers, such as float32.
        world_size: ranks of the group, which is that of all workers.
        layer: number of the layer, in a native step; None elsewhere.
        phase: decode or prompt, in a native step; empty elsewhere.
        backends: names to choose from. "group" is the engine's own process group.
    """

    name: str
    num_bytes: int
    dtype: str
    world_size: int
    layer: int | None
    phase: str
    backends: tuple[str, ...]


class CommDecision(NamedTuple):
    """How collectives of one sort are done.

    Attributes:
        backend: one of the request's.
        pieces: 1 or 2. With 2 the product before a sum of a native step is computed in two pieces, and the first one is added
            up while the second one is computed.
    """

    backend: str
    pieces: int = 1
