"""The contract of an eviction policy: events in, victims out, with a reason for each. One object for every place that runs it:
the simulator, the engine's own pool, the host tier and the disk tier.

Terms. A *block* is named by its key, a 64-bit hash of every token from the start of the sequence to the block's end (in a
trace: its `hash_id`), so a block that comes back has the key it had. A block may go once it is not *pinned*: no request holds
it, and no block that continues its prefix is left on the same tier.

Events. `on_insert` when a block comes to the tier, `on_hit` each time a request finds it there, `on_remove` when it is gone,
after any decision; victims are not gone before `on_remove` says so. The blocks of one request are told deepest first, so a
policy that goes by order alone sees leaves as the older ones.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple, NewType, Protocol

from sagellm.core.errors import PolicyError
from sagellm.core.hooks import EvictionDecision, MigrationPlan, Tier

__all__ = [
    "AccessHistory", "BlockKey", "BlockView", "CachedBlock", "EvictionDecision", "EvictionPolicy", "LifetimePredictor",
    "MigrationContext",
    "MigrationDecision", "MigrationEstimate", "MigrationPolicy", "MigrationPurpose", "PolicyContext", "PoolStats",
    "Tier",
    "check_decision",
]  # fmt: skip

BlockKey = NewType("BlockKey", int)  # 0 to 2**64 - 1
MAX_CAPACITY = 2**30
KEPT_ACCESSES = 16


class CachedBlock(NamedTuple):
    """A block as it comes to a tier.

    Attributes:
        key: names the block.
        parent: the block before it in the sequence; None for a first block.
        depth: blocks from the start of the sequence to its end; 1 for a first block.
        num_tokens: tokens in the block.
        size_bytes: of keys and values of all layers.
        cost_s: seconds to compute it again; 0 if unknown.
        tenant_id: whose it is.
        time_s: when, on the clock of the trace or the engine.
    """

    key: BlockKey
    parent: BlockKey | None = None
    depth: int = 1
    num_tokens: int = 1
    size_bytes: int = 1
    cost_s: float = 0.0
    tenant_id: str = ""
    time_s: float = 0.0


class BlockView(Protocol):
    """Questions of a context to the owner of the blocks of one tier."""

    def num_pins(self, key: BlockKey) -> int:
        """Requests that hold the block, plus blocks of the tier that continue its prefix. Raises KeyError: not on the tier."""
        ...

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        """The block before it, whether or not that is on the tier."""
        ...


class PoolStats(NamedTuple):
    """Blocks of one tier. `used` counts cached blocks and what requests hold beside them; `pinned` counts cached blocks that
    may not go now."""

    capacity: int
    used: int
    free: int
    pinned: int


class AccessHistory:
    """Times at which requests found blocks, the last `KEPT_ACCESSES` of each.

    It is empty until a policy asks for the first time. The owner notes accesses only if `is_kept`.
    """

    def __init__(self) -> None:
        self._times: dict[BlockKey, deque[float]] = {}
        self.is_kept = False

    def note(self, key: BlockKey, time_s: float) -> None:
        self._times.setdefault(key, deque(maxlen=KEPT_ACCESSES)).append(time_s)

    def forget(self, key: BlockKey) -> None:
        self._times.pop(key, None)

    def of(self, key: BlockKey) -> tuple[float, ...]:
        """Return the times, oldest first, and note accesses from now on."""
        self.is_kept = True
        return tuple(self._times.get(key, ()))


class TierStats(Protocol):
    """Questions of a context to the owner of a tier, asked only when a policy looks."""

    def pool_stats(self) -> PoolStats: ...

    def tenant_stats(self) -> dict[str, int]:
        """Cached blocks by tenant."""
        ...

    def access_history(self, key: BlockKey) -> tuple[float, ...]:
        """Times at which requests found the block, as `AccessHistory.of` returns them."""
        ...


class PolicyContext:
    """One question: give up `count` blocks of `tier`. A policy takes victims one by one, until none is missing.

    `incoming`: keys of the blocks that the room is for, in the order in which they will come; empty if unknown.
    `time_s`: now, on the clock of the events.
    """

    def __init__(
        self, count: int, blocks: BlockView, *, tier: Tier = Tier.GPU, incoming: Sequence[BlockKey] = (), time_s: float = 0.0,
        stats: TierStats | None = None,
    ) -> None:  # fmt: skip
        self.count = count
        self._stats = stats
        self.tier = tier
        self.incoming = incoming
        self.time_s = time_s
        self._blocks = blocks
        self._taken: dict[BlockKey, str] = {}
        self._unpinned: dict[BlockKey, int] = {}  # pins that a block lost to victims

    @property
    def pool_stats(self) -> PoolStats | None:
        """Blocks of the tier, counted when asked: O(blocks). None: the owner does not count them."""
        return None if self._stats is None else self._stats.pool_stats()

    @property
    def tenant_stats(self) -> dict[str, int] | None:
        """Cached blocks by tenant, counted when asked. None: the owner does not count them."""
        return None if self._stats is None else self._stats.tenant_stats()

    def access_history(self, key: BlockKey) -> tuple[float, ...] | None:
        """Return when requests found this block, oldest first, at most the last 16 times; its insertion is not among them.

        The owner keeps a history from the first question of any policy on, so the first answers are empty. A block that left
        the tier has lost its history. Times in seconds on the clock of the events. None: the owner keeps no history.
        """
        return None if self._stats is None else self._stats.access_history(key)

    @property
    def missing(self) -> int:
        """How many victims are still wanted."""
        return self.count - len(self._taken)

    def is_evictable(self, key: BlockKey) -> bool:
        """Whether the block may be taken next, after those that were taken. Raises KeyError: not on the tier."""
        return key not in self._taken and self._blocks.num_pins(key) == self._unpinned.get(key, 0)

    def take(self, key: BlockKey, reason: str) -> BlockKey | None:
        """Make the block a victim. Returns the block before it if that one may be taken now, else None.

        Raises:
            PolicyError: it is not on the tier, pinned, or taken already.
        """
        try:
            is_evictable = self.is_evictable(key)
        except KeyError:
            raise PolicyError(f"victim {key} is not on tier {self.tier.value}; choose among its blocks.") from None
        if not is_evictable:
            why = "taken already" if key in self._taken else "held by a request or by a block that continues it"
            raise PolicyError(f"victim {key} is {why}; ask is_evictable before take.")
        self._taken[key] = reason
        parent = self._blocks.parent_of(key)
        if parent is None:
            return None
        try:
            self._blocks.num_pins(parent)
        except KeyError:
            return None
        self._unpinned[parent] = self._unpinned.get(parent, 0) + 1
        return parent if self.is_evictable(parent) else None

    def take_in_order(self, keys: Iterable[BlockKey], reason: Callable[[BlockKey], str]) -> None:
        """Take what is missing from `keys`, first to last; a block that was passed over is taken as soon as it may be.

        So each victim is the first one in `keys` that may go at that moment, as if `keys` were walked anew for each.
        """
        passed: dict[BlockKey, int] = {}
        for place, key in enumerate(keys):
            if self.missing <= 0:
                return
            passed[key] = place
            victim: BlockKey | None = key if self.is_evictable(key) else None
            # Taking a block frees at most the one before it: of those passed, only that one can come into question.
            while victim is not None and victim in passed and self.missing > 0:
                victim = self.take(victim, reason(victim))

    def decision(self, reason: str = "") -> EvictionDecision:
        return EvictionDecision(tuple(self._taken), reason, tuple(self._taken.values()))


class EvictionPolicy(ABC):
    """Base of every policy. An instance serves one tier of one engine and is called by one thread at a time.

    Args:
        capacity: blocks that the tier has room for, 1 to 2**30.
        options: the policy's own, from the configuration.

    Raises:
        PolicyError: bad capacity or options; in events, a key that is on the tier already (`on_insert`) or is not, or a block
            with invalid attributes.
    """

    name: ClassVar[str]

    def __init__(self, capacity: int, **options: Any) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or not 1 <= capacity <= MAX_CAPACITY:
            raise PolicyError(f"capacity {capacity!r}: a policy needs room for at least 1 block, and at most {MAX_CAPACITY}.")
        if options:
            raise PolicyError(f"policy {self.name} has no options {sorted(options)}.")
        self.capacity = capacity

    @abstractmethod
    def on_insert(self, block: CachedBlock) -> None:
        """The block is on the tier from now on."""

    @abstractmethod
    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        """A request found the block."""

    @abstractmethod
    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        """The block has left the tier. `evicted`: to make room, so that a policy with a ghost list may remember it; else it
        was invalidated or moved to a faster tier."""

    @abstractmethod
    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        """Choose `context.count` blocks that may go, or all there are. Nothing leaves before `on_remove` says so."""


def check_decision(decision: EvictionDecision, context: PolicyContext) -> EvictionDecision:
    """The decision as plain values, if the tier can follow it. Fewer victims than wanted are allowed.

    Args:
        context: a fresh one, of the same blocks and count.

    Raises:
        PolicyError: no EvictionDecision; more victims than wanted, one that is foreign, pinned or named twice, or not one
            reason for each.
    """
    if not isinstance(decision, EvictionDecision):
        raise PolicyError(f"select_victims returned {decision!r}; return an EvictionDecision.")
    try:
        victims = [BlockKey(int(key)) for key in decision.victims]
        reasons = [str(reason) for reason in decision.reasons] or [str(decision.reason)] * len(victims)
    except (TypeError, ValueError):
        raise PolicyError(f"{decision!r} does not hold keys and texts; give victims and a reason for each.") from None
    if len(victims) > context.count:
        raise PolicyError(f"{len(victims)} victims where {context.count} were wanted; choose no more.")
    if len(reasons) != len(victims):
        raise PolicyError(f"{len(reasons)} reasons for {len(victims)} victims; give one for each, or none.")
    for key, reason in zip(victims, reasons, strict=True):
        context.take(key, reason)
    return context.decision(str(decision.reason))


class MigrationPurpose(str, Enum):
    DEMOTE = "demote"  # blocks are victims of their tier: keep them on a slower one, or drop them
    LOAD = "load"  # a request could use blocks of a slower tier: load them, or compute them again


class MigrationContext(NamedTuple):
    """Blocks that could be moved.

    Attributes:
        purpose: why.
        src_tier, dst_tier: from where to where.
        blocks: victims in their order, or for a load the blocks that continue the prefix which is there, in theirs.
        num_tokens_before: tokens of the sequence before the first block (load).
        queued_bytes: on their way between these tiers, ahead of these blocks.
        num_running: requests among which the engine shares its time now.
        time_s: now, on the clock of the events.
        num_free: blocks for which `dst_tier` has room (load); each one more makes another leave. None: for all of them.
    """

    purpose: MigrationPurpose
    src_tier: Tier
    dst_tier: Tier
    blocks: tuple[CachedBlock, ...]
    num_tokens_before: int = 0
    queued_bytes: int = 0
    num_running: int = 0
    time_s: float = 0.0
    num_free: int | None = None


class MigrationEstimate(NamedTuple):
    """Seconds: to move the blocks, to compute them again, and what moving saves (negative: it costs)."""

    transfer_s: float
    recompute_s: float
    net_benefit_s: float


class MigrationDecision(NamedTuple):
    """`plan.block_ids` are keys, in the order of the context, the blocks to move; the others are dropped or computed again.
    For a load they are the first ones. `net_benefit`: seconds saved, as far as known."""

    plan: MigrationPlan
    net_benefit: float
    reason: str = ""


class MigrationPolicy(ABC):
    """Decides which blocks are worth a move between tiers."""

    name: ClassVar[str]

    @abstractmethod
    def plan(self, context: MigrationContext) -> MigrationDecision: ...


class LifetimePredictor(ABC):
    """Predicts for how long a block should be kept. Times in seconds, on the clock of the events."""

    name: ClassVar[str]

    @abstractmethod
    def observe(self, key: BlockKey, time_s: float) -> None:
        """The block was inserted or found at this moment; times never fall."""

    @abstractmethod
    def predict_ttl(self, key: BlockKey, time_s: float, quantile: float = 0.5) -> float:
        """Seconds from `time_s` until the block is found again, with this probability of sooner; infinity for never."""
