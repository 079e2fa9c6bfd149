"""The tree of the plain twin: one node a block, nothing clever. The tree of `ReferencePrefixIndex`, used under its lock."""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sagellm.core.errors import BlockReuseError, LockError, PrefixIndexError
from sagellm.prefix_reuse.base import TIERS, Int32Array, PrefixEvent, PrefixEventKind, PrefixRemoval, RemovalReason
from sagellm.prefix_reuse.matcher import EMPTY_HASH, extended_hash

Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Block:
    """A cached block, or the root of a namespace, which has no tokens. `tier`: place in `TIERS`."""

    namespace: str
    above: "Block | None" = None
    tokens: Tokens = ()
    prefix_hash: int = EMPTY_HASH
    tier: int = -1
    block_id: int = -1
    stamp: int = 0
    entry_id: int = 0
    metadata: str | None = None
    below: "dict[Tokens, Block]" = field(default_factory=dict)

    @property
    def place(self) -> tuple[int, int]:
        return self.tier, self.block_id

    @property
    def is_root(self) -> bool:
        return self.above is None

    def path(self) -> "list[Block]":
        """From the top down to this one."""
        path, block = [], self
        while not block.is_root:
            path.append(block)
            block = block.above
        return path[::-1]

    def match(self, parts: list[Tokens]) -> "list[Block]":
        """The blocks below this one that hold `parts`, as far as they are there."""
        path, block = [], self
        for part in parts:
            block = block.below.get(part)
            if block is None:
                break
            path.append(block)
        return path

    def subtree(self) -> "list[Block]":
        """This one and all below it, children before parents."""
        blocks = [self]
        for block in blocks:
            blocks.extend(block.below.values())
        return blocks[::-1]


class BlockTree:
    """Blocks, stamps, locks and events. `removed`: number of blocks by reason."""

    def __init__(self, event_capacity: int) -> None:
        self.roots: dict[str, Block] = {}
        self.places: dict[tuple[int, int], Block] = {}
        self.named: dict[int, Block] = {}
        self.locks: dict[int, Block] = {}
        self.tick = self.last_entry = self.last_lock = self.last_event = 0
        self.events: deque[PrefixEvent] = deque(maxlen=event_capacity)
        self.removed: Counter[RemovalReason] = Counter()

    def root(self, namespace: str) -> Block:
        return self.roots.setdefault(namespace, Block(namespace))

    def find(self, namespace: str, parts: list[Tokens]) -> list[Block]:
        root = self.roots.get(namespace)
        return root.match(parts) if root else []

    def at(self, ids: list[int], tier: int) -> list[Block]:
        """Those blocks, each named once; raises for one that is not cached."""
        if len(set(ids)) != len(ids):
            raise PrefixIndexError("kv_block_ids names a block twice; name each once.")
        missing = [block_id for block_id in ids if (tier, block_id) not in self.places]
        if missing:
            raise PrefixIndexError(f"blocks {missing[:8]} on {TIERS[tier].value} are not cached; ask contains() first.")
        return [self.places[tier, block_id] for block_id in ids]

    def name(self, block: Block) -> int:
        """Its entry id; it gets one the first time it is shown."""
        if not block.is_root and not block.entry_id:
            block.entry_id = self.last_entry = self.last_entry + 1
            self.named[block.entry_id] = block
        return block.entry_id

    def stamp(self, end: Block) -> None:
        """The next tick, on the whole path."""
        self.tick += 1
        for block in end.path():
            block.stamp = self.tick

    def lock(self, end: Block) -> int:
        self.last_lock += 1
        self.locks[self.last_lock] = end
        return self.last_lock

    def locked(self, lock: int) -> Block:
        """Where the path of a lock ends."""
        if lock not in self.locks:
            raise LockError(f"lock {lock} is unknown or was released; a lock comes from lookup(lock=True).")
        return self.locks[lock]

    def lock_counts(self) -> Counter[Block]:
        return Counter(block for end in self.locks.values() for block in end.path())

    def refuse_locked(self, blocks: list[Block]) -> None:
        locked = self.lock_counts()
        held = [f"{block.block_id} on {TIERS[block.tier].value}" for block in blocks if block in locked]
        if held:
            raise LockError(f"nothing was removed, since blocks are locked ({', '.join(held[:8])}); unlock them first.")

    def refuse_taken(self, ids: list[int], tier: int, may_hold: Callable[[int, Block], bool]) -> None:
        """Raises if an id is given twice, or is that of a cached block which may not hold the id of that row."""
        twice = [block_id for block_id, times in Counter(ids).items() if times > 1]
        if twice:
            raise BlockReuseError(f"block {twice[0]} is given twice; each id holds one block of tokens.")
        for row, block_id in enumerate(ids):
            holder = self.places.get((tier, block_id))
            if holder is not None and not may_hold(row, holder):
                raise BlockReuseError(
                    f"block {block_id} on {TIERS[tier].value} is cached and holds another prefix; evict or invalidate it "
                    "before its bytes are written again."
                )

    def store(self, start: Block, parts: list[Tokens], ids: list[int], tier: int) -> tuple[Block, int, PrefixRemoval]:
        """The end of the path, how many blocks were added, and the removal of those that gave way."""
        known = start.match(parts)
        self.refuse_taken(ids, tier, lambda row, holder: row < len(known) and known[row] is holder)
        replaced = {block: block_id for block, block_id in zip(known, ids, strict=False) if block.tier > tier}
        gone = PrefixRemoval(ids_of(reversed(replaced)), tiers_of(reversed(replaced)))
        self.removed[RemovalReason.REPLACED] += len(replaced)
        self.move(replaced, tier)
        end, added = known[-1] if known else start, []
        for part, block_id in list(zip(parts, ids, strict=True))[len(known) :]:
            block = Block(end.namespace, end, part, extended_hash(end.prefix_hash, part), tier, block_id)
            end.below[part] = self.places[block.place] = end = block
            added.append(block)
        self.stamp(end)
        if added:
            self._tell_stored(added)
        return end, len(added), gone

    def sequence(self, path: list[Block], num_blocks: int) -> list[Block]:
        """Return the blocks to remove with a sequence of `num_blocks` full blocks. Those of `path` are cached. Children
        come before parents."""
        locked, is_whole = self.lock_counts(), bool(path) and len(path) == num_blocks
        doomed = path[-1].subtree() if is_whole else []
        for block in reversed(path[:-1] if is_whole else path):
            goes_on = any(below not in doomed[-1:] for below in block.below.values())
            if goes_on or block.metadata is not None or block in locked:
                break
            doomed.append(block)
        return doomed

    def least_recent(self, number: int, tier: int) -> list[Block]:
        locked = self.lock_counts()
        free = [block for block in self.places.values() if block.tier == tier and block not in locked]
        return sorted(free, key=lambda block: (block.stamp, -len(block.path())))[:number]

    def evict(self, victims: list[Block], reason: RemovalReason) -> PrefixRemoval:
        """Each with all below it that is still there."""
        chosen, doomed = set(victims), {}
        for victim in victims:
            for block in victim.subtree():
                doomed.setdefault(block, reason if block in chosen else RemovalReason.ORPHANED)
        return self.remove(doomed)

    def remove(self, doomed: dict[Block, RemovalReason]) -> PrefixRemoval:
        """In this order, children before parents. An event for each run of equal reason, tier and namespace."""
        removal = PrefixRemoval(ids_of(doomed), tiers_of(doomed))
        runs = itertools.groupby(doomed.items(), lambda item: (item[1], item[0].tier, item[0].namespace))
        for (reason, tier, key), run in runs:
            blocks = [block for block, _ in run]
            self.tell(
                kind=PrefixEventKind.REMOVED, namespace=key, tier=TIERS[tier], reason=reason,
                kv_block_ids=ids_of(blocks), block_hashes=hashes_of(blocks),
            )  # fmt: skip
        for block in doomed:
            del block.above.below[block.tokens]
            del self.places[block.place]
            self.named.pop(block.entry_id, None)
        self.removed.update(doomed.values())
        return removal

    def move(self, new_ids: dict[Block, int], tier: int) -> None:
        """All at once, since ids may trade places. An event for each namespace and old tier, from the top down."""
        for key, old in sorted({(block.namespace, block.tier) for block in new_ids}):
            moved = sorted(
                (b for b in new_ids if (b.namespace, b.tier) == (key, old)), key=lambda block: len(block.path())
            )
            self.tell(
                kind=PrefixEventKind.MOVED, namespace=key, tier=TIERS[tier], src_tier=TIERS[old],
                kv_block_ids=np.array([new_ids[block] for block in moved], np.int32), src_block_ids=ids_of(moved),
            )  # fmt: skip
        for block in new_ids:
            del self.places[block.place]
        for block, block_id in new_ids.items():
            block.tier, block.block_id = tier, block_id
            self.places[block.place] = block

    def clear(self) -> None:
        for held in (self.roots, self.places, self.named, self.locks):
            held.clear()
        self.tell(kind=PrefixEventKind.CLEARED)

    def tell(self, **fields) -> None:
        self.last_event += 1
        self.events.append(PrefixEvent(sequence=self.last_event, **fields))

    def _tell_stored(self, added: list[Block]) -> None:
        above = added[0].above
        self.tell(
            kind=PrefixEventKind.STORED, namespace=above.namespace, tier=TIERS[added[0].tier], kv_block_ids=ids_of(added),
            token_ids=tokens_of(added), parent=None if above.is_root else (TIERS[above.tier], above.block_id),
            block_hashes=hashes_of(added), last_access=self.tick,
        )  # fmt: skip

    def dump(self) -> list:
        """All but locks and entry ids, for JSON. Equal trees give equal ones."""
        trees = []
        for key in sorted(key for key, root in self.roots.items() if root.below):
            blocks, rows = [self.roots[key]], []
            for row, above in enumerate(blocks):
                for tokens, block in sorted(above.below.items()):
                    blocks.append(block)
                    rows.append([row, *block.place, block.stamp, block.metadata, *tokens])
            trees.append([key, rows])
        return [self.tick, self.last_event, trees]

    def load(self, dumped: list) -> None:
        """Into an empty tree."""
        self.tick, self.last_event, trees = dumped
        for key, rows in trees:
            blocks = [self.root(key)]
            for row, tier, block_id, stamp, metadata, *tokens in rows:
                above, part = blocks[row], tuple(tokens)
                hashed = extended_hash(above.prefix_hash, part)
                block = Block(key, above, part, hashed, tier, block_id, stamp, metadata=metadata)
                above.below[part] = self.places[block.place] = block
                blocks.append(block)

    def check(self, block_size: int) -> None:
        """Raises AssertionError if the tree contradicts itself."""
        found = [block for root in self.roots.values() for block in root.subtree() if not block.is_root]
        assert {block.place: block for block in found} == self.places and len(found) == len(self.places)
        assert {block.entry_id: block for block in found if block.entry_id} == self.named
        for block in found:
            above = block.above
            assert above.below[block.tokens] is block and above.namespace == block.namespace
            assert len(block.tokens) == block_size and 0 <= block.tier < len(TIERS) and block.block_id >= 0
            assert block.prefix_hash == extended_hash(above.prefix_hash, block.tokens)
            assert block.stamp <= (self.tick if above.is_root else above.stamp)
        reachable = {*found, *self.roots.values()}
        assert all(end in reachable for end in self.locks.values())


def ids_of(blocks: Iterable[Block]) -> Int32Array:
    return np.array([block.block_id for block in blocks], np.int32)


def tiers_of(blocks: Iterable[Block]) -> NDArray[np.int8]:
    return np.array([block.tier for block in blocks], np.int8)


def tokens_of(blocks: Iterable[Block]) -> Int32Array:
    return np.array([token for block in blocks for token in block.tokens], np.int32)


def hashes_of(blocks: Iterable[Block]) -> NDArray[np.uint64]:
    return np.array([block.prefix_hash for block in blocks], np.uint64)
