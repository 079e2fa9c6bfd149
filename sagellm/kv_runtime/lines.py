"""How blocks stand in the lines of a record, and back."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sagellm.kv_policy.base import BlockKey, CachedBlock

_NUMBER = re.compile(r"-?\d[\d.]*(e[+-]?\d+)?")


def hexed(keys: Iterable[int]) -> list[str]:
    """Sixteen digits each, as in the engine's own lines."""
    return [f"{key:016x}" for key in keys]


def keys_of(names: Iterable[str]) -> list[BlockKey]:
    """Raises ValueError or TypeError for what is no such list."""
    return [BlockKey(int(name, 16)) for name in names]


def block_row(block: CachedBlock) -> list[Any]:
    """The fields of a block in their order."""
    parent = None if block.parent is None else f"{block.parent:016x}"
    return [f"{block.key:016x}", parent, *block[2:]]


def line_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON form of an event or a decision: keys and blocks as above, tiers by name."""
    return {name: _FORMATS[name](value) if name in _FORMATS else value for name, value in fields.items()}


def _refusals(refused: Mapping[int, str] | Sequence[int]) -> dict[str, str] | list[str]:
    if isinstance(refused, Mapping):
        return {f"{key:016x}": str(why) for key, why in refused.items()}
    return hexed(refused)


_FORMATS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("keys", "incoming", "locked", "unlocked"), hexed),
    **dict.fromkeys(("tier", "src", "dst"), lambda tier: tier.value),
    "tiers": lambda tiers: [tier.value for tier in tiers],
    "blocks": lambda blocks: [block_row(block) for block in blocks],
    "refused": _refusals,
    "victims": lambda victims: [[f"{key:016x}", reason] for key, reason in victims],
    "demote": lambda plans: [[plan.src_tier.value, plan.dst_tier.value, hexed(plan.block_ids)] for plan in plans],
    "drop": lambda drops: [[tier.value, f"{key:016x}", reason] for tier, key, reason in drops],
}


def block_of(row: Sequence[Any]) -> CachedBlock:
    """Raises ValueError or TypeError for what is no such row."""
    key, parent, *rest = row
    return CachedBlock(BlockKey(int(key, 16)), None if parent is None else BlockKey(int(parent, 16)), *rest)


def kind_of(reason: str) -> str:
    """A reason without its numbers, to be counted."""
    return _NUMBER.sub("n", reason)
