"""The prefix index in plain Python. The oracle of the native one."""

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm.core.errors import PrefixIndexError
from sagellm.prefix_reuse import arguments
from sagellm.prefix_reuse.base import (
    TIERS,
    CachedBlocks,
    Int32Array,
    PrefixEntry,
    PrefixEvents,
    PrefixHit,
    PrefixRemoval,
    RemovalReason,
)
from sagellm.prefix_reuse.block_tree import Block, BlockTree, Tokens, ids_of, tiers_of, tokens_of

MAGIC = b"sagellm prefix twin 1"


class ReferencePrefixIndex:
    """See `base.PrefixIndex`. A call may look at every block, and excludes all others.

    `block_size`: tokens a block, 1 to 256. `event_capacity`: events that are kept for listeners.
    """

    def __init__(self, block_size: int = 16, *, event_capacity: int = 0) -> None:
        self.block_size = arguments.block_size(block_size)
        self._tree = BlockTree(arguments.integer(event_capacity, "event_capacity"))
        self._counters: Counter[str] = Counter()
        self._mutex = threading.Lock()

    def insert(self, tokens, kv_block_ids, namespace="", *, tier="gpu", metadata=None) -> PrefixEntry:
        parts, ids, place = *self._parts(tokens, kv_block_ids), arguments.tier_place(tier)
        key, text = arguments.namespace_key(namespace), arguments.metadata_json(metadata)
        with self._mutex:
            return self._store(self._tree.root(key), parts, ids, place, text)

    def extend(self, lock, tokens, kv_block_ids, *, tier="gpu") -> PrefixEntry:
        parts, ids, place = *self._parts(tokens, kv_block_ids), arguments.tier_place(tier)
        lock = arguments.integer(lock, "lock")
        with self._mutex:
            entry = self._store(self._tree.locked(lock), parts, ids, place)
            self._tree.locks[lock] = self._tree.locks[lock].match(parts)[-1] if parts else self._tree.locks[lock]
            return entry

    def _store(self, start: Block, parts: list[Tokens], ids: list[int], tier: int, metadata: str | None = None):
        end, num_new, gone = self._tree.store(start, parts, ids, tier)
        if metadata is not None and not end.is_root:
            end.metadata = metadata
        num_tokens = len(parts) * self.block_size
        self._counters.update(inserts=1, inserted_tokens=num_tokens, new_blocks=num_new)
        rows = end.path()[len(start.path()) :]
        return self._entry(end, rows, num_new, gone if len(gone) else None)

    def lookup(self, tokens, namespace="", *, touch=True, lock=False) -> PrefixHit:
        (parts, rest), key = self._split(tokens), arguments.namespace_key(namespace)
        with self._mutex:
            path = self._tree.find(key, parts)
            matched, num_tokens = len(path) * self.block_size, len(parts) * self.block_size + rest
            self._counters.update(lookups=1, hits=bool(path), query_tokens=num_tokens, matched_tokens=matched)
            end = path[-1] if path else self._tree.root(key) if lock else Block(key)
            if touch:
                self._tree.stamp(end)
                self._tree.name(end)
            return self._hit(path, num_tokens, self._tree.lock(end) if lock else 0)

    def lookup_tiers(self, tokens, namespace="") -> list[PrefixHit]:
        (parts, rest), key = self._split(tokens), arguments.namespace_key(namespace)
        with self._mutex:
            path = self._tree.find(key, parts)
            lengths = set()
            for slowest in range(len(TIERS)):
                beyond = (row for row, block in enumerate(path) if block.tier > slowest)
                lengths.add(next(beyond, len(path)))
            num_tokens = len(parts) * self.block_size + rest
            return [self._hit(path[:length], num_tokens) for length in sorted(lengths - {0}, reverse=True)]

    def unlock(self, lock) -> None:
        lock = arguments.integer(lock, "lock")
        with self._mutex:
            end = self._tree.locked(lock)
            del self._tree.locks[lock]
            self._tree.stamp(end)

    def invalidate(self, tokens=None, namespace=None, *, kv_block_ids=None, tier="gpu", entry_id=None) -> PrefixRemoval:
        named = [tokens, kv_block_ids, entry_id, None if tokens is not None else namespace]
        if sum(value is not None for value in named) > 1:
            raise PrefixIndexError(
                "invalidate got more than one thing to forget; give tokens (with or without their namespace), "
                "kv_block_ids, entry_id or namespace, or nothing for everything."
            )
        place, key = arguments.tier_place(tier), None if namespace is None else arguments.namespace_key(namespace)
        parts = None if tokens is None else self._split(tokens)[0]
        ids = None if kv_block_ids is None else arguments.int32_array(kv_block_ids, "kv_block_ids").tolist()
        with self._mutex:
            if parts is not None:
                doomed = self._tree.sequence(self._tree.find(key or "", parts), len(parts))
            elif ids is not None:
                tops = filter(None, (self._tree.places.get((place, block_id)) for block_id in ids))
                doomed = [block for top in tops for block in top.subtree()]
            elif entry_id is not None:
                path = self._named(entry_id).path()
                doomed = self._tree.sequence(path, len(path))
            else:
                roots = [root for name, root in self._tree.roots.items() if key in (None, name)]
                doomed = [block for root in roots for block in root.subtree() if not block.is_root]
            self._tree.refuse_locked(doomed)
            return self._tree.remove(dict.fromkeys(doomed, RemovalReason.INVALIDATED))

    def evict_lru(self, num_blocks, tier="gpu") -> PrefixRemoval:
        number, place = arguments.integer(num_blocks, "num_blocks"), arguments.tier_place(tier)
        with self._mutex:
            return self._tree.evict(self._tree.least_recent(number, place), RemovalReason.EVICTED)

    def evict(self, kv_block_ids, tier="gpu", reason=RemovalReason.POLICY) -> PrefixRemoval:
        ids, place = arguments.int32_array(kv_block_ids, "kv_block_ids").tolist(), arguments.tier_place(tier)
        reason = arguments.removal_reason(reason)
        with self._mutex:
            victims = self._tree.at(ids, place)
            self._tree.refuse_locked(victims)
            for victim in victims:
                forgotten = [b for b in victim.subtree() if b.tier == place and b not in victims]
                if forgotten:
                    raise PrefixIndexError(
                        f"block {forgotten[0].block_id} on {TIERS[place].value} hangs below block {victim.block_id} and is "
                        "not among those to evict; name it too."
                    )
            return self._tree.evict(victims, reason)

    def select_lru(self, num_blocks, tier="gpu") -> Int32Array:
        number, place = arguments.integer(num_blocks, "num_blocks"), arguments.tier_place(tier)
        with self._mutex:
            return ids_of(self._tree.least_recent(number, place))

    def move(self, kv_block_ids, new_ids, src_tier, dst_tier) -> None:
        ids = arguments.int32_array(kv_block_ids, "kv_block_ids").tolist()
        new = arguments.int32_array(new_ids, "new_ids").tolist()
        src, dst = arguments.tier_place(src_tier), arguments.tier_place(dst_tier)
        if len(ids) != len(new):
            raise PrefixIndexError(f"got {len(ids)} kv_block_ids and {len(new)} new_ids; give one new id a block.")
        with self._mutex:
            blocks = self._tree.at(ids, src)
            self._tree.refuse_taken(new, dst, lambda row, holder: holder in blocks)
            self._tree.move(dict(zip(blocks, new, strict=True)), dst)

    def clear(self) -> None:
        with self._mutex:
            self._tree.clear()

    def blocks(self, tier=None, *, unlocked=False) -> CachedBlocks:
        place = None if tier is None else arguments.tier_place(tier)
        with self._mutex:
            locks = self._tree.lock_counts()
            blocks = self._on(place)
            rows = [block for block in blocks if not (unlocked and locks[block])]
            shown = set(rows)
            int64 = (
                [block.block_id for block in rows],
                [block.above.block_id if block.above in shown else -1 for block in rows],
                [block.stamp for block in rows],
                [len(block.path()) * self.block_size for block in rows],
                [locks[block] for block in rows],
            )
            ids, *others = (np.array(column, np.int64) for column in int64)
            return CachedBlocks(ids, tiers_of(rows), *others)

    def contains(self, kv_block_ids, tier="gpu") -> NDArray[np.bool_]:
        ids, place = arguments.int32_array(kv_block_ids, "kv_block_ids").tolist(), arguments.tier_place(tier)
        with self._mutex:
            return np.array([(place, block_id) in self._tree.places for block_id in ids], dtype=bool)

    def entry(self, entry_id) -> PrefixEntry:
        with self._mutex:
            block = self._named(entry_id)
            return self._entry(block, block.path())

    def tokens(self, entry_id) -> Int32Array:
        with self._mutex:
            return tokens_of(self._named(entry_id).path())

    def entries(self, namespace=None) -> Iterator[PrefixEntry]:
        key = None if namespace is None else arguments.namespace_key(namespace)
        with self._mutex:
            ends = [block for block in self._on(None) if not block.below and key in (None, block.namespace)]
            return iter([self._entry(block, block.path()) for block in ends])

    def namespaces(self) -> list[str]:
        with self._mutex:
            return sorted(key for key, root in self._tree.roots.items() if root.below)

    def num_blocks(self, tier=None) -> int:
        place = None if tier is None else arguments.tier_place(tier)
        with self._mutex:
            return len(self._on(place))

    def events(self, after=0) -> PrefixEvents:
        after = arguments.integer(after, "after")
        with self._mutex:
            kept = tuple(event for event in self._tree.events if event.sequence > after)
            last = self._tree.last_event
            return PrefixEvents(kept, max(0, last - after) - len(kept), last)

    def snapshot(self) -> bytes:
        with self._mutex:
            body = json.dumps([self.block_size, self._tree.dump()]).encode()
        return MAGIC + b" %s\n" % sha256(body).hexdigest().encode() + body

    @classmethod
    def restore(cls, data: bytes, *, event_capacity: int = 0) -> "ReferencePrefixIndex":
        """An index as it was when `snapshot` wrote `data`. It has no locks and has counted nothing.

        Raises:
            PrefixIndexError: these bytes are not a whole snapshot of this class.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise PrefixIndexError(f"a snapshot is bytes, got a {type(data).__name__}; pass what snapshot() returned.")
        head, _, body = bytes(data).partition(b"\n")
        if head != MAGIC + b" %s" % sha256(body).hexdigest().encode():
            raise PrefixIndexError(
                f"these {len(data)} bytes are no whole snapshot of {cls.__name__}; take a new one, or start empty."
            )
        block_size, dumped = json.loads(body)
        index = cls(block_size, event_capacity=event_capacity)
        index._tree.load(dumped)
        return index

    def memory_bytes(self) -> int:
        with self._mutex:
            parts = (part for block in self._on(None) for part in (block, block.tokens, block.below))
            return sys.getsizeof(self._tree.places) + sum(map(sys.getsizeof, parts))

    def metrics(self) -> dict[str, Any]:
        memory_bytes = self.memory_bytes()
        with self._mutex:
            names = ("lookups", "hits", "query_tokens", "matched_tokens", "inserts", "inserted_tokens", "new_blocks")
            return {name: self._counters[name] for name in names} | {
                "removed_blocks": {reason.value: self._tree.removed[reason] for reason in RemovalReason},
                "collisions": 0,
                "blocks": {tier.value: len(self._on(place)) for place, tier in enumerate(TIERS)},
                "nodes": len(self._tree.places),
                "locks": len(self._tree.locks),
                "memory_bytes": memory_bytes,
                "latency_ns": [],
            }

    def check(self) -> None:
        """Raises AssertionError if the index contradicts itself."""
        with self._mutex:
            self._tree.check(self.block_size)

    def _split(self, tokens) -> tuple[list[Tokens], int]:
        """Full blocks, and the number of tokens left over."""
        values = arguments.int32_array(tokens, "tokens").tolist()
        size, full = self.block_size, len(values) // self.block_size
        return [tuple(values[row * size : (row + 1) * size]) for row in range(full)], len(values) % size

    def _parts(self, tokens, kv_block_ids) -> tuple[list[Tokens], list[int]]:
        """Full blocks and their ids."""
        parts, rest = self._split(tokens)
        ids = arguments.int32_array(kv_block_ids, "kv_block_ids").tolist()
        if len(ids) != len(parts) and (not rest or len(ids) != len(parts) + 1):
            raise PrefixIndexError(
                f"got {len(ids)} kv_block_ids for {len(parts)} full blocks of {self.block_size} tokens and {rest} tokens "
                "more; give one for each full block, and one for the rest or none."
            )
        return parts, ids[: len(parts)]

    def _on(self, tier: int | None) -> list[Block]:
        return [block for block in self._tree.places.values() if tier in (None, block.tier)]

    def _named(self, entry_id) -> Block:
        number = arguments.integer(entry_id, "entry_id")
        if number not in self._tree.named:
            raise PrefixIndexError(f"entry {number} is not cached (any more); look its tokens up again.")
        return self._tree.named[number]

    def _entry(
        self, block: Block, rows: list[Block], num_new: int = 0, replaced: PrefixRemoval | None = None
    ) -> PrefixEntry:
        return PrefixEntry(
            entry_id=self._tree.name(block), token_hash=block.prefix_hash,
            token_length=len(block.path()) * self.block_size, kv_block_ids=ids_of(rows), tiers=tiers_of(rows),
            metadata=None if block.metadata is None else json.loads(block.metadata),
            num_new_blocks=num_new, replaced=replaced,
        )  # fmt: skip

    def _hit(self, path: list[Block], num_tokens: int, lock: int = 0) -> PrefixHit:
        matched = len(path) * self.block_size
        return PrefixHit(
            matched_length=matched, remaining_tokens=num_tokens - matched, confidence=1.0,
            kv_block_ids=ids_of(path), tiers=tiers_of(path), entry_id=path[-1].entry_id if path else 0, lock=lock,
        )  # fmt: skip
