"""What a pass is, and what it is told."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from sagellm.core.errors import PlanError

if TYPE_CHECKING:
    from sagellm.scheduler_ir.graph import IRGraph

__all__ = ["Pass", "PassSettings"]


@dataclass(frozen=True)
class PassSettings:
    """What the passes go by. With the defaults nothing is cut.

    Attributes:
        token_budget: new tokens of a step; longer prefills are cut. 0: no limit.
        max_batch_size: requests in one decode step. 0: no limit.
        bytes_per_s: (source tier, target tier) -> bytes per second; a load between tiers that are not here has no cost.
        max_collective_bytes: collectives are fused up to so many. The default is about where NCCL's bandwidth stops growing.
        fusable_ops: collectives that work place by place, so that those of two buffers give what one of both gives. Not so
            where the layout goes by rank, as in all_gather and reduce_scatter.

    Raises:
        PlanError: a number below the least one.
    """

    token_budget: int = 0
    max_batch_size: int = 0
    bytes_per_s: Mapping[tuple[str, str], float] = field(default_factory=dict)
    max_collective_bytes: int = 32 * 2**20
    fusable_ops: frozenset[str] = frozenset({"all_reduce", "broadcast", "reduce"})

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_batch_size", "max_collective_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PlanError(f"{name} is {value!r}; give a whole number from 0 on.")
        for pair, speed in self.bytes_per_s.items():
            if not (isinstance(pair, tuple) and len(pair) == 2):
                raise PlanError(f"bytes_per_s has the key {pair!r}; give a source tier and a target tier.")
            if not speed > 0:
                raise PlanError(f"bytes_per_s of {' to '.join(pair)} is {speed!r}; give a number above 0.")
        object.__setattr__(self, "bytes_per_s", MappingProxyType(dict(self.bytes_per_s)))
        object.__setattr__(self, "fusable_ops", frozenset(self.fusable_ops))


Pass = Callable[["IRGraph", PassSettings], "IRGraph"]
