"""How blocks stand in the lines of a record, and back."""

import re
from collections.abc import Iterable, Sequence
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


def block_of(row: Sequence[Any]) -> CachedBlock:
    """Raises ValueError or TypeError for what is no such row."""
    key, parent, *rest = row
    return CachedBlock(BlockKey(int(key, 16)), None if parent is None else BlockKey(int(parent, 16)), *rest)


def kind_of(reason: str) -> str:
    """A reason without its numbers, to be counted."""
    return _NUMBER.sub("n", reason)
