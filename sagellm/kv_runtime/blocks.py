"""Which block is on which tiers, what continues it there, and which requests hold it."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sagellm.core.errors import PolicyError
from sagellm.core.hooks import RequestId, Tier
from sagellm.kv_policy.base import BlockKey, BlockView, CachedBlock

__all__ = ["BlockManager"]

_FAST = (Tier.GPU, Tier.CPU)


class _Entry:
    """A block that is on at least one tier. `num_locks`: requests that hold it, on gpu or cpu; `num_reads`: of its file."""

    __slots__ = ("block", "num_locks", "num_reads", "tiers")

    def __init__(self, block: CachedBlock) -> None:
        self.block = block
        self.tiers: list[Tier] = []
        self.num_locks = 0
        self.num_reads = 0


class _Below:
    """The blocks that continue one block, whether or not that is known itself, how many of them are on each tier, and how many
    reads of their files are under way."""

    __slots__ = ("children", "num_on", "num_reads")

    def __init__(self) -> None:
        self.children: dict[BlockKey, None] = {}
        self.num_on = dict.fromkeys(Tier, 0)
        self.num_reads = 0


class _View(BlockView):
    def __init__(self, books: "BlockManager", tier: Tier) -> None:
        self._books = books
        self._tier = tier

    def num_pins(self, key: BlockKey) -> int:
        return self._books.num_pins(key, self._tier)

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return self._books.block(key).parent


class BlockManager:
    """The books of all tiers. They hold no bytes and decide nothing; every call is O(1) or O(blocks named).

    `check` asserts these invariants.
    - A block is on gpu or on cpu, never on both. It may be on nvme as well.
    - The lock of a block of gpu or cpu is the number of requests that hold it there.
    - The counts of blocks, bytes, unlocked blocks and children by tier are those of the blocks.

    Pins. On gpu: locks and children on gpu. On cpu: locks and children on gpu or cpu, since an engine never finds a child
    whose parent is gone. On both: reads of children's files, which would be of no use. On nvme: children on nvme and reads
    under way; a file is found by its key, so a child without its parent is of no use until that is back, and of use again then.

    Repeated events are defined. A block that is on the tier already stays as it was. A request that is unknown, or
    releases twice, holds nothing. A block that is evicted while requests hold it is taken from them.
    """

    def __init__(self) -> None:
        self._entries: dict[BlockKey, _Entry] = {}
        self._below: dict[BlockKey, _Below] = {}
        self._held: dict[RequestId, list[BlockKey | None]] = {}
        self._recency: dict[tuple[Tier, str | None], OrderedDict[BlockKey, None]] = {}
        self._num_bytes = dict.fromkeys(Tier, 0)
        self._num_unlocked = dict.fromkeys(_FAST, 0)
        self._views = {tier: _View(self, tier) for tier in Tier}

    # what there is

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def block(self, key: BlockKey) -> CachedBlock:
        """Raises KeyError: on no tier."""
        return self._entries[key].block

    def is_on(self, key: BlockKey, tier: Tier) -> bool:
        entry = self._entries.get(key)
        return entry is not None and tier in entry.tiers

    def fast_tier(self, key: BlockKey) -> Tier | None:
        """gpu or cpu; None where neither has it."""
        entry = self._entries.get(key)
        if entry is not None:
            for tier in entry.tiers:
                if tier is not Tier.NVME:
                    return tier
        return None

    def num_resident(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first blocks of a sequence are on gpu or cpu."""
        for place, key in enumerate(keys):
            if self.fast_tier(key) is None:
                return place
        return len(keys)

    def num_blocks(self, tier: Tier) -> int:
        return len(self._recency.get((tier, None), ()))

    def num_bytes(self, tier: Tier) -> int:
        return self._num_bytes[tier]

    def num_unlocked(self, tier: Tier) -> int:
        """Blocks of gpu or cpu that no request holds."""
        return self._num_unlocked[tier]

    def tenants(self, tier: Tier) -> dict[str, int]:
        """Blocks by tenant."""
        return {
            tenant: len(keys)
            for (on, tenant), keys in self._recency.items()
            if on is tier and tenant is not None and keys
        }

    def recency(self, tier: Tier, tenant: str | None = None) -> Iterator[BlockKey]:
        """Keys of the tier, or of one tenant there, least recently used first."""
        return iter(self._recency.get((tier, tenant), ()))

    def has_below(self, key: BlockKey, tier: Tier) -> bool:
        """Whether a block on this tier continues the block."""
        below = self._below.get(key)
        return below is not None and below.num_on[tier] > 0

    def below(self, key: BlockKey, tier: Tier) -> list[BlockKey]:
        """Every block on this tier that continues the block, deepest first, through blocks of this tier alone."""
        found: list[BlockKey] = []
        waiting = [key]
        while waiting:
            below = self._below.get(waiting.pop())
            if below is not None and below.num_on[tier]:
                children = [child for child in below.children if self.is_on(child, tier)]
                found += children
                waiting += children
        return found[::-1]

    # pins

    def view(self, tier: Tier) -> BlockView:
        return self._views[tier]

    def num_pins(self, key: BlockKey, tier: Tier) -> int:
        """Raises KeyError: not on the tier."""
        entry = self._entries[key]
        if tier not in entry.tiers:
            raise KeyError(key)
        below = self._below.get(key)
        if tier is Tier.NVME:
            return entry.num_reads + (below.num_on[tier] if below else 0)
        if below is None:
            return entry.num_locks
        num_pins = entry.num_locks + below.num_reads + below.num_on[Tier.GPU]
        return num_pins + below.num_on[Tier.CPU] if tier is Tier.CPU else num_pins

    def is_evictable(self, key: BlockKey, tier: Tier) -> bool:
        return self.num_pins(key, tier) == 0

    def num_locks(self, key: BlockKey) -> int:
        """Requests that hold the block. Raises KeyError: on no tier."""
        return self._entries[key].num_locks

    def num_held(self, request_id: RequestId) -> int:
        """How many of its first blocks a request holds, as far as the books know."""
        return len(self._held.get(request_id, ()))

    def held(self, request_id: RequestId) -> list[BlockKey | None]:
        """The blocks that a request holds, by their place in its sequence; None for one that is unknown or gone."""
        return list(self._held.get(request_id, ()))

    def held_at(self, request_id: RequestId, place: int) -> BlockKey | None:
        """The request's block number `place`, from 0; None where it holds none there that is known."""
        held = self._held.get(request_id, ())
        return held[place] if 0 <= place < len(held) else None

    def is_child(self, key: BlockKey, parent: BlockKey | None) -> bool:
        """Whether the block continues this one, or nothing. Raises KeyError: on no tier."""
        return self._entries[key].block.parent == parent

    def requests(self) -> list[RequestId]:
        return list(self._held)

    def lock(self, request_id: RequestId, first: int, keys: Sequence[BlockKey]) -> None:
        """The request holds these blocks as its blocks `first` and following; what it held there, it lets go."""
        if not keys:
            return
        held = self._held.setdefault(request_id, [])
        held.extend([None] * (first + len(keys) - len(held)))
        for place, key in enumerate(keys, first):
            before = held[place]
            if before == key:
                continue
            if before is not None:
                self._add_locks(before, -1)
            held[place] = key if self.fast_tier(key) is not None else None
            if held[place] is not None:
                self._add_locks(key, 1)

    def release(self, request_id: RequestId, num_kept: int = 0) -> list[BlockKey]:
        """The request lets go of all but its first blocks. Returns those it held until now, in order of the sequence."""
        held = self._held.get(request_id, [])
        gone = [key for key in held[max(num_kept, 0) :] if key is not None]
        for key in gone:
            self._add_locks(key, -1)
        del held[max(num_kept, 0) :]
        if not held:
            self._held.pop(request_id, None)
        return gone

    def unlock_all(self, key: BlockKey) -> None:
        """Release the block from all requests. O(blocks held)."""
        for held in self._held.values():
            for place, other in enumerate(held):
                if other == key:
                    held[place] = None
                    self._add_locks(key, -1)

    def begin_read(self, key: BlockKey) -> None:
        """The file of the block must stay until `end_read`, and what the block continues should."""
        self._add_reads(self._entries[key], 1)

    def end_read(self, key: BlockKey) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.num_reads:
            self._add_reads(entry, -1)

    def _add_reads(self, entry: _Entry, count: int) -> None:
        entry.num_reads += count
        if entry.block.parent is not None:
            self._below[entry.block.parent].num_reads += count

    def _add_locks(self, key: BlockKey, count: int) -> None:
        entry = self._entries[key]
        was_unlocked = entry.num_locks == 0
        entry.num_locks += count
        tier = self.fast_tier(key)
        if tier is not None:
            self._num_unlocked[tier] += (entry.num_locks == 0) - was_unlocked

    # changes

    def collides(self, block: CachedBlock) -> bool:
        """Whether another block has this key: it continues something else, or has another length."""
        entry = self._entries.get(block.key)
        if entry is None:
            return False
        other = entry.block
        return (other.parent, other.depth, other.num_tokens) != (block.parent, block.depth, block.num_tokens)

    def add(self, block: CachedBlock, tier: Tier) -> None:
        """The block is on the tier from now on, as its most recent one.

        Raises:
            PolicyError: the key names another block, or the block is on gpu and would be on cpu too, or the reverse.
        """
        key = block.key
        if self.collides(block):
            raise PolicyError(f"block {key:016x} continues another block than the one that has this key; give it up.")
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(block)
            if block.parent is not None:
                self._below.setdefault(block.parent, _Below()).children[key] = None
        elif tier in entry.tiers:
            return
        elif tier is not Tier.NVME and self.fast_tier(key) is not None:
            raise PolicyError(
                f"block {key:016x} is on {self.fast_tier(key).value}; move it, a block is on gpu or on cpu."
            )
        entry.tiers.append(tier)
        self._count(entry, tier, 1)
        self.touch(key)

    def remove(self, key: BlockKey, tier: Tier) -> None:
        """The block is not on the tier any more; from gpu or cpu it goes out of the hands of those who held it.

        Raises:
            KeyError: it was not.
        """
        entry = self._entries[key]
        if tier not in entry.tiers:
            raise KeyError(key)
        if tier is not Tier.NVME and entry.num_locks:
            self.unlock_all(key)
        self._count(entry, tier, -1)
        entry.tiers.remove(tier)
        if tier is Tier.NVME:
            self._add_reads(entry, -entry.num_reads)
        if not entry.tiers:
            del self._entries[key]
            self._forget_child(entry.block.parent, key)

    def move(self, key: BlockKey, src: Tier, dst: Tier) -> None:
        """From gpu to cpu or back; who holds the block goes on doing so. Raises KeyError: not on `src`."""
        entry = self._entries[key]
        if src not in entry.tiers:
            raise KeyError(key)
        self._count(entry, src, -1)
        entry.tiers[entry.tiers.index(src)] = dst
        self._count(entry, dst, 1)
        self.touch(key)

    def touch(self, key: BlockKey) -> None:
        """The block was used: it is the most recent one of its tiers."""
        entry = self._entries[key]
        for tier in entry.tiers:
            self._recency[tier, None].move_to_end(key)
            self._recency[tier, entry.block.tenant_id].move_to_end(key)

    def _count(self, entry: _Entry, tier: Tier, sign: int) -> None:
        block = entry.block
        for tenant in (None, block.tenant_id):
            order = self._recency.setdefault((tier, tenant), OrderedDict())
            if sign > 0:
                order[block.key] = None
            else:
                del order[block.key]
                if not order and tenant is not None:  # clients make up names of tenants
                    del self._recency[tier, tenant]
        self._num_bytes[tier] += sign * block.size_bytes
        if tier is not Tier.NVME and entry.num_locks == 0:
            self._num_unlocked[tier] += sign
        if block.parent is not None:
            self._below[block.parent].num_on[tier] += sign

    def _forget_child(self, parent: BlockKey | None, key: BlockKey) -> None:
        if parent is not None:
            below = self._below[parent]
            del below.children[key]
            if not below.children:
                del self._below[parent]

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold. O(blocks)."""
        locks = dict.fromkeys(self._entries, 0)
        for held in self._held.values():
            for key in held:
                if key is not None:
                    assert self.fast_tier(key) is not None, f"{key:016x} is held and on no tier"
                    locks[key] += 1
        for tier in Tier:
            on = [entry for entry in self._entries.values() if tier in entry.tiers]
            assert {entry.block.key for entry in on} == set(self.recency(tier))
            assert self._num_bytes[tier] == sum(entry.block.size_bytes for entry in on)
            assert sum(self.tenants(tier).values()) == len(on)
            if tier is not Tier.NVME:
                assert self._num_unlocked[tier] == sum(entry.num_locks == 0 for entry in on)
        for key, entry in self._entries.items():
            assert entry.tiers and len(set(entry.tiers)) == len(entry.tiers)
            assert not set(_FAST) <= set(entry.tiers), f"{key:016x} is on gpu and on cpu"
            assert entry.num_locks == locks[key], f"{key:016x}: {entry.num_locks} locks, {locks[key]} requests"
            assert entry.block.parent is None or key in self._below[entry.block.parent].children
        for key, below in self._below.items():
            assert below.children, f"{key:016x} has no children left"
            assert below.num_reads == sum(self._entries[child].num_reads for child in below.children)
            for tier in Tier:
                assert below.num_on[tier] == sum(self.is_on(child, tier) for child in below.children)
