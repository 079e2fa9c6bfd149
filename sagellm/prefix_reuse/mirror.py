"""A copy of an index, kept by its events: what a router or another tier knows of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sagellm.core.errors import PrefixIndexError
from sagellm.core.hooks import Tier
from sagellm.prefix_reuse import arguments
from sagellm.prefix_reuse.base import (
    TIERS,
    Int32Array,
    Namespace,
    PrefixEvent,
    PrefixEventKind,
    PrefixIndex,
)

Place = tuple[Tier, int]


class EventGap(PrefixIndexError):
    """An event that cannot follow what the mirror has seen: some are missing, or it is of another index."""


class MirrorBlock(NamedTuple):
    """A block that the mirrored index caches. `parent`: where the block above it lies, None at the top. `depth`: tokens of
    the prefix up to and including the block. `last_access`: its stamp when it was stored, a lower bound of the index's."""

    namespace: str
    tier: Tier
    kv_block_id: int
    parent: Place | None
    depth: int
    token_ids: tuple[int, ...]
    last_access: int


@dataclass(eq=False, slots=True)
class _Node:
    """A block, or the root of a namespace."""

    namespace: str
    above: "_Node | None" = None
    token_ids: tuple[int, ...] = ()
    depth: int = 0
    place: Place | None = None
    last_access: int = 0
    below: "dict[tuple[int, ...], _Node]" = field(default_factory=dict)


class PrefixMirror:
    """Blocks, tiers and tokens of an index; no locks, and recency only as far as events tell it. Not thread-safe.

    A call to `catch_up` is all a listener needs; `apply` is for events that arrive some other way.

    Attributes:
        sequence: number of the last event applied.
        num_resyncs: how often the copy had to be made anew from a snapshot.
    """

    def __init__(self) -> None:
        self.sequence = 0
        self.num_resyncs = 0
        self._forget()

    def __len__(self) -> int:
        """Blocks."""
        return sum(map(len, self._nodes.values()))

    def catch_up(self, index: PrefixIndex) -> int:
        """Apply what happened since the last call; returns the number of events applied.

        Where events were lost, or the index is younger than the mirror, the mirror starts again from a snapshot and counts
        that in `num_resyncs`.
        """
        news = index.events(self.sequence)
        if news.num_lost or news.last_sequence < self.sequence:
            self.resync(index)
            return 0
        for event in news.events:
            self.apply(event)
        return len(news.events)

    def resync(self, index: PrefixIndex) -> None:
        """Forget everything and copy the index through a snapshot, which is of one moment."""
        copy = type(index).restore(index.snapshot())
        rows = copy.blocks()
        stamps = {
            (TIERS[tier], int(block_id)): int(stamp)
            for tier, block_id, stamp in zip(rows.tiers, rows.kv_block_ids, rows.last_access, strict=True)
        }
        self._forget()
        for key in copy.namespaces():
            for entry in copy.entries(key):
                places = [
                    (TIERS[tier], int(block_id)) for tier, block_id in zip(entry.tiers, entry.kv_block_ids, strict=True)
                ]
                self._store(self._root(key), copy.tokens(entry.entry_id), places, stamps)
        self.sequence = copy.events().last_sequence
        self.num_resyncs += 1

    def apply(self, event: PrefixEvent) -> None:
        """Raises EventGap, with nothing changed, if the event is not the next one or names a block that is not here."""
        if event.sequence != self.sequence + 1:
            raise EventGap(f"got event {event.sequence}, expected {self.sequence + 1}; call catch_up() or resync().")
        places = [(event.tier, int(block_id)) for block_id in event.kv_block_ids]
        match event.kind:
            case PrefixEventKind.STORED:
                above = self._root(event.namespace) if event.parent is None else self._at([event.parent], event)[0]
                self._store(above, event.token_ids, places, dict.fromkeys(places, event.last_access))
            case PrefixEventKind.REMOVED:
                self._remove(event, places)
            case PrefixEventKind.MOVED:
                self._move(event, places)
            case PrefixEventKind.CLEARED:
                self._forget()
        self.sequence = event.sequence

    def match(self, tokens: Any, namespace: str | Namespace = "") -> int:
        """Tokens of the longest prefix that is cached in the mirrored index, whatever tiers it lies on."""
        values, node = (
            arguments.int32_array(tokens, "tokens").tolist(),
            self._roots.get(arguments.namespace_key(namespace)),
        )
        while node is not None and node.below:
            size = len(next(iter(node.below)))
            child = node.below.get(tuple(values[node.depth : node.depth + size]))
            if child is None:
                break
            node = child
        return node.depth if node is not None else 0

    def blocks(self) -> Iterator[MirrorBlock]:
        """Every block, in no particular order."""
        for namespace, nodes in self._nodes.items():
            for (tier, block_id), node in nodes.items():
                yield MirrorBlock(
                    namespace, tier, block_id, node.above.place, node.depth, node.token_ids, node.last_access
                )

    def _forget(self) -> None:
        self._roots: dict[str, _Node] = {}
        # By namespace, since blocks of two namespaces may trade places, which is told one namespace after the other.
        self._nodes: dict[str, dict[Place, _Node]] = {}

    def _root(self, namespace: str) -> _Node:
        return self._roots.setdefault(namespace, _Node(namespace))

    def _store(self, above: _Node, token_ids: Int32Array, places: list[Place], stamps: Mapping[Place, int]) -> None:
        """Blocks that hang one below the other; those that are known already stay as they are."""
        size = len(token_ids) // len(places)
        nodes = self._nodes.setdefault(above.namespace, {})
        for row, place in enumerate(places):
            part = tuple(int(token) for token in token_ids[row * size : (row + 1) * size])
            if part not in above.below:
                node = _Node(above.namespace, above, part, above.depth + size, place, stamps[place])
                above.below[part] = nodes[place] = node
            above = above.below[part]

    def _remove(self, event: PrefixEvent, places: list[Place]) -> None:
        removed = self._at(places, event)
        for place, node in zip(places, removed, strict=True):
            del self._nodes[event.namespace][place]
            del node.above.below[node.token_ids]

    def _move(self, event: PrefixEvent, places: list[Place]) -> None:
        old_places = [(event.src_tier, int(block_id)) for block_id in event.src_block_ids]
        moved = self._at(old_places, event)
        nodes = self._nodes[event.namespace]
        for place in old_places:
            del nodes[place]
        for place, node in zip(places, moved, strict=True):
            node.place = place
            nodes[place] = node

    def _at(self, places: list[Place], event: PrefixEvent) -> list[_Node]:
        nodes = self._nodes.get(event.namespace, {})
        missing = [place for place in places if place not in nodes]
        if missing:
            tier, block_id = missing[0]
            raise EventGap(
                f"event {event.sequence} ({event.kind.value}) names block {block_id} on {tier.value}, which is not here: it "
                "is of another index. Call resync()."
            )
        return [nodes[place] for place in places]
