"""Token sequences, and what indexes hold and give back in a form that can be compared."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from sagellm.prefix_reuse import HashedPrefixIndex
from sagellm.prefix_reuse.base import CachedBlocks, PrefixIndex, PrefixRemoval

Place = tuple[int, int]  # place of the tier in TIERS, block id


def sequence(letters: Iterable[int], block_size: int, num_rest: int = 0) -> list[int]:
    """A block for each letter; blocks of different letters differ in their last token alone."""
    blocks = [[1] * (block_size - 1) + [letter] for letter in letters]
    return [token for block in blocks for token in block] + [1] * num_rest


def places(found: Any) -> list[Place]:
    """(tier, id) of the blocks of a hit, an entry or a removal, in their order."""
    return list(zip(found.tiers.tolist(), found.kv_block_ids.tolist(), strict=True))


def removed(removal: PrefixRemoval | None) -> list[Place]:
    """Return the places of the blocks that were removed, sorted."""
    return [] if removal is None else sorted(places(removal))


def rows(blocks: CachedBlocks) -> list[tuple[int, ...]]:
    """(tier, id, parent, stamp, depth, locks) of each block, sorted."""
    columns = (blocks.tiers, blocks.kv_block_ids, blocks.parent_ids, blocks.last_access, blocks.depth, blocks.num_locks)
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def contents(index: PrefixIndex) -> dict[str, list[tuple]]:
    """By namespace: tokens, places and metadata of every longest prefix."""
    found = {}
    for key in index.namespaces():
        ends = [(index.tokens(entry.entry_id).tolist(), places(entry), entry.metadata) for entry in index.entries(key)]
        found[key] = sorted(ends, key=lambda end: end[0])
    return found


def tree(index: PrefixIndex) -> dict[Place, tuple]:
    """By place: namespace, place of the block above or None, depth, tokens of the block."""
    found = {}
    for key, ends in contents(index).items():
        for tokens, path, _ in ends:
            for row, place in enumerate(path):
                size = index.block_size
                above = path[row - 1] if row else None
                found[place] = (key, above, (row + 1) * size, tuple(tokens[row * size : (row + 1) * size]))
    return found


def check_order(removal: PrefixRemoval, before: dict[Place, tuple]) -> None:
    """No block left before one below it; `before` is the `tree` that it left."""
    gone: set[Place] = set()
    for place in places(removal):
        below = {other for other, (_, above, *_) in before.items() if above == place}
        assert below <= gone, f"{place} left before {below - gone}"
        gone.add(place)


def mirrored(mirror: Any, index: PrefixIndex) -> bool:
    """Whether a mirror holds the prefixes of an index and no others."""
    hashed, found = HashedPrefixIndex(index.block_size), set()
    for key, ends in contents(index).items():
        for tokens, *_ in ends:
            found.update(hashed.hashes(tokens, key))
    return set(mirror.index) == found and len(found) == index.num_blocks()


def int32(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)


A, B, C, D = [1, 2], [3, 4], [5, 6], [7, 8]


def stamps(index) -> dict[int, int]:
    blocks = index.blocks()
    return dict(zip(blocks.kv_block_ids.tolist(), blocks.last_access.tolist(), strict=True))


def ids(index, tier=None) -> list[int]:
    return sorted(index.blocks(tier).kv_block_ids.tolist())
