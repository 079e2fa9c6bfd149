"""A copy of an index, kept by its events: what a router knows of an engine's cache."""

from typing import NamedTuple

from sagellm.core.errors import PrefixIndexError
from sagellm.prefix_reuse.base import PrefixEventKind, PrefixIndex
from sagellm.prefix_reuse.hashed import HashedPrefixIndex, namespace_key
from sagellm.prefix_reuse.matcher import prefix_hashes

__all__ = ["EventGap", "PrefixChanges", "PrefixMirror", "changes_of", "snapshot_of"]


class EventGap(PrefixIndexError):
    """Changes that cannot follow what the mirror has: some were lost, or they are of another index."""


class PrefixChanges(NamedTuple):
    """The net change of an index between two of its events.

    Attributes:
        after: number of the last event before the change.
        sequence: number of the last event in it.
        stored: hashes of blocks that are cached after the change.
        removed: hashes of blocks that left. A hash in both lists is cached.
        is_all: `stored` replaces all that was known.
        num_left: hashes of the same snapshot that later parts bring.
    """

    after: int
    sequence: int
    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    is_all: bool = False
    num_left: int = 0


def changes_of(index: PrefixIndex, after: int) -> PrefixChanges:
    """Return what happened after event `after`; a snapshot where the index keeps these events no longer."""
    news = index.events(after)
    if news.num_lost or news.last_sequence < after:
        return snapshot_of(index)
    stored: dict[int, None] = {}
    removed: dict[int, None] = {}
    is_all = False
    for event in news.events:
        if event.kind is PrefixEventKind.CLEARED:
            stored, removed, is_all = {}, {}, True
            continue
        keys = (event.block_hashes ^ namespace_key(event.namespace)).tolist()
        if event.kind is PrefixEventKind.STORED:
            stored.update(dict.fromkeys(keys))
        elif event.kind is PrefixEventKind.REMOVED:
            for key in keys:
                stored.pop(key, None)
            removed.update(dict.fromkeys(keys))
    return PrefixChanges(after, news.last_sequence, tuple(stored), tuple(removed), is_all)


def snapshot_of(index: PrefixIndex) -> PrefixChanges:
    """Return all that an index caches, of one moment. O(cached tokens)."""
    copy = type(index).restore(index.snapshot())
    keys: dict[int, None] = {}
    for namespace in copy.namespaces():
        mixed_in = namespace_key(namespace)
        for entry in copy.entries(namespace):
            hashes = prefix_hashes(copy.tokens(entry.entry_id), copy.block_size) ^ mixed_in
            keys.update(dict.fromkeys(hashes.tolist()))
    sequence = copy.events().last_sequence
    return PrefixChanges(sequence, sequence, tuple(keys), is_all=True)


class PrefixMirror:
    """The cached prefixes of an index, as hashes. Not thread-safe.

    Args:
        block_size: tokens a block of the mirrored index.

    Attributes:
        index: the prefixes, for lookups.
        sequence: number of the last event applied.
        num_resyncs: how often a snapshot replaced a copy that had missed events.
    """

    def __init__(self, block_size: int = 16) -> None:
        self.index = HashedPrefixIndex(block_size)
        self.sequence = 0
        self.num_resyncs = 0
        self._num_left = 0

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.index)

    def apply(self, changes: PrefixChanges) -> None:
        """Take the next changes, or a snapshot. Changes that a snapshot includes already are ignored.

        Raises:
            EventGap: changes are missing before these; nothing is changed. Ask for a snapshot.
        """
        if changes.is_all:
            self.num_resyncs += changes.after != self.sequence
            self.index.clear()
        elif changes.sequence < self.sequence or changes.after < changes.sequence == self.sequence:
            return
        elif changes.after != self.sequence or self._num_left not in (0, changes.num_left + len(changes.stored)):
            raise EventGap(
                f"got events {changes.after + 1} to {changes.sequence}, expected {self.sequence + 1} and {self._num_left} "
                "hashes of a snapshot; ask for a new snapshot."
            )
        self.index.remove(changes.removed)
        self.index.store(changes.stored)
        self.sequence, self._num_left = changes.sequence, changes.num_left

    def catch_up(self, index: PrefixIndex) -> None:
        """Apply what happened in an index of this process since the last call."""
        self.apply(changes_of(index, self.sequence))

    def match(self, tokens: object, namespace: str = "") -> int:
        """Return how many of the first `tokens` the mirrored index caches, on any tier."""
        return self.index.match(tokens, namespace)
