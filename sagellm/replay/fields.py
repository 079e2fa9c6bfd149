"""Whether the fields of a recorded line have the types that a manager takes: damage is told by line and field."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from sagellm.core.hooks import Tier
from sagellm.replay.base import shortened

_HASH = re.compile("[0-9a-f]{16}")
_TIERS = {tier.value for tier in Tier}
_SPEC = {"tier", "capacity", "policy", "options"}


def check_fields(line: Mapping[str, Any]) -> None:
    """Raises ValueError: a field that is no such thing as its name says. Fields that are missing or unknown pass."""
    for name, value in line.items():
        is_good, expected = _FIELDS.get(name, _ANYTHING)
        if not is_good(value):
            raise ValueError(f"{name} is {shortened(value)}; {expected} was expected")


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 0


def _is_time(value: Any) -> bool:
    return _is_whole(value) or (type(value) is float and math.isfinite(value))


def _is_hash(value: Any) -> bool:
    return type(value) is str and _HASH.fullmatch(value) is not None


def _are_hashes(value: Any) -> bool:
    return type(value) is list and all(map(_is_hash, value))


def _is_block(value: Any) -> bool:
    """key, parent, depth, tokens, bytes, cost in seconds, tenant, time: as `kv_runtime.lines.block_row` writes them."""
    if type(value) is not list or len(value) != 8:
        return False
    key, parent, *counts, cost_s, tenant, time_s = value
    are_counts = all(map(_is_count, counts)) and _is_time(cost_s) and _is_time(time_s)
    return _is_hash(key) and (parent is None or _is_hash(parent)) and are_counts and type(tenant) is str


def _is_refusal(value: Any) -> bool:
    if type(value) is dict:
        return all(map(_is_hash, value)) and all(type(why) is str for why in value.values())
    return _are_hashes(value)


def _are_specs(value: Any) -> bool:
    if type(value) is not list or not all(type(row) is dict for row in value):
        return type(value) is list and all(type(name) is str for name in value)  # of a decision: names of tiers
    return all(set(row) <= _SPEC and _is_tier(row.get("tier")) and _is_options(row.get("options", {})) for row in value)


def _is_tier(value: Any) -> bool:
    return type(value) is str and value in _TIERS


def _is_options(value: Any) -> bool:
    return type(value) is dict


def _is_migration(value: Any) -> bool:
    return value is None or (
        type(value) is dict and type(value.get("name")) is str and _is_options(value.get("options"))
    )


def _are_quotas(value: Any) -> bool:
    return value is None or (type(value) is dict and all(type(limits) is dict for limits in value.values()))


def _are_pairs(value: Any) -> bool:
    return type(value) is list and all(type(pair) is list and len(pair) == 2 for pair in value)


_ANYTHING: tuple[Callable[[Any], bool], str] = (lambda value: True, "")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("keys", "incoming", "locked", "unlocked"), (_are_hashes, "a list of keys of 16 hexadecimal digits")),
    **dict.fromkeys(("tier", "src", "dst"), (_is_tier, "gpu, cpu or nvme")),
    **dict.fromkeys(("n", "count", "num_kept", "num_resident", "num_running", "found"), (_is_count, "a count")),
    **dict.fromkeys(("limit", "matched", "queued_bytes"), (_is_whole, "an integer")),
    **dict.fromkeys(("reason", "model"), (lambda value: type(value) is str, "a string")),
    "pid": (lambda value: value is None or type(value) in (int, str), "a number"),
    "request": (lambda value: value is None or type(value) in (int, str), "a number"),
    "time_s": (_is_time, "a finite number"),
    "evicted": (lambda value: type(value) is bool, "true or false"),
    "blocks": (lambda value: type(value) is list and all(map(_is_block, value)), "a list of blocks"),
    "refused": (_is_refusal, "an object of keys and reasons, or a list of keys"),
    "tiers": (_are_specs, "a list of tiers, with tier, capacity, policy and options"),
    "migration": (_is_migration, "an object with name and options, or null"),
    "quotas": (_are_quotas, "an object of objects, or null"),
    "block_size": (lambda value: value is None or (_is_count(value) and value > 0), "a number of tokens"),
    "victims": (_are_pairs, "a list of pairs of key and reason"),
}  # fmt: skip
