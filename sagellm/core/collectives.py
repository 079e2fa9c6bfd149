"""Collectives of an engine, as hooks see them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

__all__ = [
    "GROUP", "MAX_PIECES", "CommDecision", "CommOp", "CommRequest", "CommRule", "read_rules", "sort_bytes", "sort_of",
    "unknown_backend",
]  # fmt: skip

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
        device: where the tensors lie, such as cpu or cuda. One backend may be for another device than the process group.
    """

    name: str
    num_bytes: int
    dtype: str
    world_size: int
    layer: int | None
    phase: str
    backends: tuple[str, ...]
    device: str = "cpu"


class CommDecision(NamedTuple):
    """How collectives of one sort are done.

    Attributes:
        backend: one of the request's.
        pieces: 1 or 2. With 2 a native step computes half of its rows while the sums of the other half are under way. None:
            `OverlapWindow` measures which is quicker.
        fused: what experts and a shared expert have computed is one sum of a native step. False: it is two sums.
    """

    backend: str
    pieces: int | None = None
    fused: bool = True

    def fault(self, backends: tuple[str, ...]) -> str:
        """Return what is wrong with it, if it is to be one of these backends; empty if nothing is."""
        if self.backend in backends and self.pieces in (None, *range(1, MAX_PIECES + 1)) and self.fused in (True, False):
            return ""
        return f"give a CommDecision of {', '.join(backends)}, in 1 to {MAX_PIECES} pieces or None, fused or not"


class CommRule(NamedTuple):
    """How collectives of one sort are done in the steps that name it, whatever their type of numbers.

    Attributes:
        name: function of torch.distributed, such as all_reduce.
        num_bytes: size of a rank's tensor; sizes up to the same power of two are one sort.
        backend, pieces, fused: as in `CommDecision`.
    """

    name: str
    num_bytes: int
    backend: str
    pieces: int | None = None
    fused: bool = True


def sort_bytes(num_bytes: int) -> int:
    """Return the size that stands for a sort of collectives: the next power of two."""
    return 1 << max(0, num_bytes - 1).bit_length()


def sort_of(rule: CommRule) -> tuple[str, int]:
    """Return the sort of collectives that a rule is about: name and size."""
    return rule.name, sort_bytes(rule.num_bytes)


def read_rules(rows: Iterable[Any]) -> tuple[CommRule, ...]:
    """Make rules of rows of their fields.

    Raises:
        ValueError: a row is no rule, or two are about one sort.
    """
    rules: dict[tuple[str, int], CommRule] = {}
    for row in rows:
        try:
            name, num_bytes, backend, pieces, fused = CommRule(*row)
            rule = CommRule(name, index(num_bytes), backend, None if pieces is None else index(pieces), fused)
        except TypeError:
            raise ValueError(f"{row!r} is no CommRule") from None
        if not (isinstance(name, str) and isinstance(backend, str)) or rule.num_bytes < 0:
            raise ValueError(f"{rule}: name and backend are texts, num_bytes is 0 or more")
        if fault := CommDecision(backend, rule.pieces, fused).fault((backend,)):
            raise ValueError(f"{rule}: {fault}")
        sort = sort_of(rule)
        if sort in rules:
            raise ValueError(f"{rules[sort]} and {rule} are about one sort of collectives")
        rules[sort] = rule
    return tuple(rules.values())


def unknown_backend(rules: Iterable[CommRule], known: Mapping[str, tuple[str, ...]]) -> str:
    """Return why a rule cannot be followed; empty if all can be.

    Args:
        known: by function of torch.distributed, the backends that can do it.
    """
    for rule in rules:
        if not known:
            return f"{rule.name} by {rule.backend}: the engine has one worker; start it with tensor_parallel above 1"
        if rule.name not in known:
            return f"no backend does {rule.name}; the workers can decide about {', '.join(sorted(known))}"
        if rule.backend not in known[rule.name]:
            return f"backend {rule.backend} is not in this engine; {rule.name} can be done by {', '.join(known[rule.name])}"
    return ""
