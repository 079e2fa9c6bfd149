"""The tiers of one set of books, as they are asked for."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sagellm.core.errors import PolicyError
from sagellm.core.hooks import Tier

__all__ = ["TierSpec", "check_tiers", "tier_row"]


class TierSpec(NamedTuple):
    """One tier: how many blocks it has, and who picks victims there."""

    tier: Tier
    capacity: int
    policy: str = "lru"
    options: Mapping[str, Any] = {}


def check_tiers(tiers: Sequence[TierSpec]) -> None:
    """Raises PolicyError: another order or one twice, no gpu, no room."""
    order = [tier for tier in Tier if tier in [spec.tier for spec in tiers]]
    if [spec.tier for spec in tiers] != order or Tier.GPU not in order:
        names = [spec.tier.value for spec in tiers]
        raise PolicyError(f"tiers {names}: give gpu, then cpu and nvme where there are such, each once.")
    for spec in tiers:
        if isinstance(spec.capacity, bool) or not isinstance(spec.capacity, int) or spec.capacity < 1:
            raise PolicyError(
                f"tier {spec.tier.value} with room for {spec.capacity!r} blocks; leave it out, or give it 1 or more."
            )


def tier_row(spec: TierSpec) -> dict[str, Any]:
    """As the first line of a record has it."""
    return {**spec._asdict(), "tier": spec.tier.value, "options": dict(spec.options)}
