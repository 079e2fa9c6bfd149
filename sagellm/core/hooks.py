"""The hook contract: the notices that a plug-in gets, and the decisions that it may make. It names no engine.

A plug-in is a subclass of `Plugin` that overrides the hooks it wants. Hooks whose name starts with `on_` are notices. The
others are decisions, and a decision has one owner: two plug-ins that decide the same thing are refused at start. Every array
given to a plug-in is read-only.

`on_evicted` and `on_request_end` are called at once, except for blocks that another plug-in drops (`EngineHandle.drop_blocks`).
Those and the other notices arrive in order with the plug-in's next call, at the latest with the first step that the engine
chooses after `COALESCE_S`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, NewType, Protocol

import numpy as np

from sagellm.core.collectives import CommDecision, CommOp, CommRequest, CommRule
from sagellm.core.scheduling import (
    Phase,
    RequestId,
    RequestMetadata,
    RequestView,
    ScheduleDecision,
    ServiceLevel,
    StepResult,
    StepView,
)
from sagellm.core.victims import VictimRequest

__all__ = [
    "COALESCE_S", "COMM_HOOKS", "DECISIONS", "NOTICES", "AllocationResult", "BlockCounts", "BlockId", "BlockState",
    "CommDecision", "CommOp", "CommRequest", "CommRule", "EngineHandle", "EvictionDecision", "EvictionNotice", "EvictionReason",
    "KVBlockInfo", "MigrationPlan", "MigrationResult", "Phase", "Plugin", "PrefixCandidate", "PrefixMatch",
    "PrefixQuery", "PrefixRelease", "PrefixUpdate", "RequestId", "RequestMetadata", "RequestView", "ScheduleDecision",
    "ServiceLevel", "StepResult", "StepView", "Tier", "VictimRequest", "overrides",
]  # fmt: skip

COALESCE_S = 0.01

BlockId = NewType("BlockId", int)


class Tier(str, Enum):
    """Where the bytes of a block are. `GPU` is the engine's own pool, also on a CPU device."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"


class BlockState(str, Enum):
    FREE = "free"
    CACHED = "cached"  # held by the prefix cache alone; may be evicted
    ACTIVE = "active"  # held by at least one request


class EvictionReason(str, Enum):
    PREFIX = "prefix"  # cached prefix blocks gave way
    RECOMPUTE = "recompute"  # a request that is not running lost its blocks; it is computed again if it goes on
    ABORTED = "aborted"  # a request needs more blocks than there are
    SPARSE = "sparse"  # a running request gave them up, as a sparse policy asked


@dataclass(frozen=True, slots=True)
class KVBlockInfo:
    """One block. `size_bytes` counts keys and values of all layers. `last_access` is a counter: larger is more recent."""

    block_id: BlockId
    tier: Tier
    state: BlockState
    size_bytes: int
    ref_count: int
    last_access: int
    tenant_id: str = ""


class AllocationResult(NamedTuple):
    """Blocks that a pool gave out, and their tier."""

    block_ids: tuple[BlockId, ...]
    tier: Tier


class BlockCounts(NamedTuple):
    """Blocks of the engine's pool: free + cached + active == total. Host slots are counted separately."""

    total: int
    free: int
    cached: int
    active: int
    host_total: int = 0
    host_used: int = 0


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """Move cached blocks from one tier to another."""

    src_tier: Tier
    dst_tier: Tier
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """Outcome of a migration. `moved`: in the order of the plan. `refused`: every other block -> reason."""

    moved: tuple[int, ...]
    refused: dict[int, str]


class EvictionDecision(NamedTuple):
    """Blocks to evict, first to last. `reason` explains the whole choice. `reasons` has one text a victim, or is empty."""

    victims: Sequence[int]
    reason: str = ""
    reasons: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class EvictionNotice:
    """Blocks were evicted. Called before any other notice or question names the ids again."""

    block_ids: tuple[int, ...]
    reason: EvictionReason
    request_id: RequestId | None = None


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A request before its prefix lookup. `token_ids`: int64 [n], all of its tokens."""

    request_id: RequestId
    token_ids: np.ndarray
    namespace: str
    block_size: int


def _no_hashes() -> np.ndarray:
    return np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Result of a prefix lookup, before any other question: matched blocks may not be victims.

    A request holds its matched blocks, and those it held before, until `on_prefix_released`. Matched blocks on a slower tier
    are then loaded, first ones first. If the pool lacks room, `on_prefix_released` says how many were kept; the others stay on
    their tier.

    Attributes:
        num_matched: tokens.
        block_ids: blocks that this lookup added.
        block_hashes: uint64, one for each full block of the request: hash of the prefix up to its end and the namespace.
        limit: number of blocks that could have matched.
        first: whether this is the first lookup of the request.
        time_s: on the clock of `time.monotonic`.
    """

    request_id: RequestId
    num_tokens: int
    num_matched: int
    block_ids: tuple[int, ...]
    source: str
    block_hashes: np.ndarray = field(default_factory=_no_hashes)
    limit: int = 0
    first: bool = True
    tenant_id: str = ""
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixUpdate:
    """Blocks were stored in the prefix cache. The request holds them until `on_prefix_released`.

    Blocks that were cached before are among them again. A block that replaces one on a slower tier has the same hash;
    `on_evicted` names the replaced one first.

    Attributes:
        token_ids: int64 [len(block_ids) * block_size], from token `first_token` of the request.
        block_hashes: uint64 [len(block_ids)], as in `PrefixMatch`.
        parent_hash: hash of the block before the first one.
        time_s: on the clock of `time.monotonic`.
    """

    request_id: RequestId
    namespace: str
    first_token: int
    token_ids: np.ndarray
    block_ids: tuple[int, ...]
    block_hashes: np.ndarray = field(default_factory=_no_hashes)
    parent_hash: int | None = None
    tenant_id: str = ""
    time_s: float = 0.0


class PrefixCandidate(NamedTuple):
    """A cached beginning of a sequence: its blocks in order, and the tier of each."""

    block_ids: tuple[int, ...]
    tiers: tuple[Tier, ...]


class PrefixRelease(NamedTuple):
    """A request holds only the first `num_kept` of its cached blocks now: it ended, lost blocks, or the pool lacked room.

    Every request that `on_prefix_matched` or `on_prefix_stored` named releases all of its blocks in the end, even if it has
    none. `time_s`: on the clock of `time.monotonic`.
    """

    request_id: RequestId
    num_kept: int
    time_s: float


class EngineHandle(Protocol):
    """Requests of a plug-in to its engine. Valid only inside a hook, on the thread that runs the hook.

    Attributes:
        block_bytes: size of one block of one worker: keys and values of all layers.
        layout: names the model with its weights, and the type and order of the bytes of a block. Blocks are interchangeable
            only between equal layouts. Empty if the engine does not know it.
    """

    block_size: int
    block_bytes: int
    layout: str

    def block_counts(self) -> BlockCounts: ...

    def get_block_info(self, block_ids: Sequence[int] | None = None) -> list[KVBlockInfo]:
        """Return information on these blocks, or on every block in use."""
        ...

    def allocate_blocks(self, count: int) -> AllocationResult:
        """Reserve free blocks of the pool: no request and no cached prefix can use them until `free_blocks`.

        The blocks hold no tokens. They are given back if the plug-in is switched off.

        Raises:
            CapacityError: fewer are free; nothing was reserved. Nothing is evicted for a plug-in.
            PluginError: a negative count, or an engine that cannot do it.
        """
        ...

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Give reserved blocks back. Raises PluginError: one that this plug-in did not reserve; nothing was freed."""
        ...

    def get_utilization(self) -> float:
        """Return the share of the pool's blocks that are not free, 0 to 1."""
        ...

    def get_fragmentation(self) -> float:
        """Return the share of the token slots in allocated blocks that hold no token, 0 to 1. O(requests).

        A paged pool has no other fragmentation: any free block serves any request.
        """
        ...

    def migrate_blocks(self, plan: MigrationPlan) -> MigrationResult:
        """Move cached blocks. The bytes are copied before the next forward pass reads or writes them."""
        ...

    def drop_blocks(self, block_ids: Sequence[int], reasons: Sequence[str] = ()) -> tuple[int, ...]:
        """Evict cached blocks now, in any hook. Their room is free when this returns.

        Blocks are skipped if they are not cached, a request holds them, or a block of the same tier that is not among them
        continues them. Blocks of another tier that continue them are evicted too. Other plug-ins get `on_evicted` with their
        next call; the plug-in that asks does not.

        Args:
            reasons: one for each block, or empty.

        Returns:
            Every block that was evicted.

        Raises:
            PluginError: another number of reasons, or the engine cannot do it.
        """
        ...

    def register_eviction_callback(self, callback: Callable[[EvictionNotice], None]) -> None: ...

    @property
    def is_recording(self) -> bool:
        """Whether an event log is kept."""
        ...

    @property
    def num_lost_notices(self) -> int:
        """Number of notices, the oldest first, that were dropped because this plug-in was slow."""
        ...

    def record(self, event: str, **fields: object) -> None:
        """Write a line into the engine's event log, if it keeps one."""
        ...

    def prefix_candidates(self, token_ids: Sequence[int] | np.ndarray, namespace: str) -> list[PrefixCandidate]:
        """Return the matches of a sequence, longest first: on the pool alone, and on the pool and the host tier.

        A match is among them only if it is longer than the one before. `lookup_prefix` may answer the blocks of any of them:
        the longest saves the most tokens, and the one on the pool needs no copy.

        Raises:
            PluginError: the engine keeps no index here.
        """
        ...

    def request_tokens(self, request_id: RequestId) -> tuple[np.ndarray, str]:
        """Return (int64 [n] tokens, namespace) of a request: the tokens that others may share.

        Raises:
            PluginError: no such request.
        """
        ...

    @property
    def comm_backends(self) -> Mapping[str, tuple[str, ...]]:
        """Return the backends that can do a collective of the workers, by function of torch.distributed.

        It is empty if the engine has one worker, or takes no rules (`ScheduleDecision.collectives`).
        """
        ...

    @property
    def checks_drafts(self) -> bool:
        """Whether the engine's steps can check proposed tokens (`ScheduleDecision.draft_tokens`)."""
        ...

    def request_blocks(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """Return the blocks of a request, those of its first tokens first.

        In `on_request_end` of an engine with a host tier the request has its blocks still, and `migrate_blocks` takes those
        that are cached.

        Raises:
            PluginError: no such request, or the engine does not know.
        """
        ...

    def transfer_state(self, request_id: RequestId) -> str:
        """Return what became of the transfer of a request's keys and values in a prefill/decode group.

        "arrived": they came from another engine. "read": another engine has read them. "": there was none, or it has not ended.
        Other texts say why it failed.

        Raises:
            PluginError: no such request.
        """
        ...

    def host_bytes(self, block_ids: Sequence[int]) -> list[np.ndarray]:
        """Return copies of cached blocks of the host tier: uint8 [block_bytes] each, by layer, keys before values.

        The blocks may be moved or evicted while the copies are in use.

        Raises:
            PluginError: not a cached block of the host tier, a copy from or to it is running, or another process owns the
                memory (tensor parallelism).
        """
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Release what `host_bytes` returned. An engine that returns copies does nothing."""
        ...

    def reserve_host(self, count: int) -> tuple[list[int], list[np.ndarray]]:
        """Reserve at most `count` free blocks of the host tier.

        Returns:
            Ids, and a buffer of uint8 [block_bytes] for each, which the caller fills. `adopt_host` stores them.

        Raises:
            PluginError: there is no host tier, or another process owns its memory.
        """
        ...

    def adopt_host(self, block_ids: Sequence[int], token_ids: np.ndarray, namespace: str) -> tuple[int, ...]:
        """Cache reserved blocks, filled by the caller, as the last blocks of the prefix `token_ids`.

        Blocks that are cached by now, or whose parent is not, are freed.

        Returns:
            Ids that were cached.

        Raises:
            PluginError: an id is not reserved, or the tokens fill another number of blocks. Nothing is changed then.
        """
        ...

    def free_host(self, block_ids: Sequence[int]) -> None:
        """Free reserved blocks. Raises PluginError if one is not reserved."""
        ...


class Plugin:
    """Base class of every plug-in. A hook that is not overridden is never called.

    An instance lives in the process that schedules. With tensor parallelism every worker process has its own instance for the
    `comm_*` hooks, without a call of `attach`. `options` come from the configuration.
    """

    def __init__(self, **options: object) -> None:
        if options:
            raise TypeError(f"unknown options {sorted(options)}")

    def attach(self, engine: EngineHandle) -> None:
        """Take the engine's handle. Called once, before any other hook."""

    def close(self) -> None:
        """Release resources. Called once: when the engine ends, or after the plug-in was switched off.

        The engine handle works in the first case only. The call may take a few seconds, whatever the time limit of hooks.
        """

    def report(self) -> dict[str, Any]:
        """Return numbers for `/metrics`: name -> number, or -> a dict of numbers, nested once for each label.

        Called between two steps; it must be quick.
        """
        return {}

    def exchange_policy(self, tier: Tier, policy: str, options: dict[str, Any]) -> str:
        """Let another eviction policy choose on the tier from now on; return the name of the former one.

        Called between two steps, if somebody asks the engine for it.

        Args:
            policy: a name, or `module:Class`.
            options: of the policy.

        Raises:
            PolicyError: no such tier or policy, or invalid options. The former policy goes on; the plug-in stays on.
        """
        raise NotImplementedError

    def select_victims(self, request: VictimRequest) -> EvictionDecision | Sequence[int]:
        """Choose cached blocks to evict. If they are fewer than asked for, the engine adds the least recently used."""
        raise NotImplementedError

    def on_evicted(self, notice: EvictionNotice) -> None: ...

    def lookup_prefix(self, query: PrefixQuery) -> Sequence[int] | None:
        """Return ids of cached blocks that hold the beginning of the query; None leaves the lookup to the engine."""
        raise NotImplementedError

    def on_prefix_matched(self, match: PrefixMatch) -> None: ...

    def on_prefix_stored(self, update: PrefixUpdate) -> None: ...

    def on_prefix_released(self, release: PrefixRelease) -> None: ...

    def admit(self, request: RequestMetadata) -> bool:
        """Return whether the request may join the queue now. Called before each step until the answer is True."""
        raise NotImplementedError

    def schedule(self, view: StepView) -> ScheduleDecision | None:
        """Choose the phase of a step; order, hold, cut and bound its requests.

        None leaves steps to the engine until a request comes or ends, or `COALESCE_S` have passed. `ScheduleDecision()` leaves
        this step alone to the engine.
        """
        raise NotImplementedError

    def on_step_end(self, result: StepResult) -> None: ...

    def on_request_end(self, request_id: RequestId) -> None: ...

    def comm_decide(self, request: CommRequest) -> CommDecision | None:
        """Decide how collectives of a sort are done. None leaves it to the engine.

        Called once for each sort, on rank 0; the answer holds for all ranks. The first plug-in that decides is heard.
        """

    def comm_begin(self, op: CommOp) -> object:
        """Called before a collective. `comm_end` gets what it returns."""

    def comm_end(self, op: CommOp, token: object) -> None:
        """Called after a collective, even a failed one; an asynchronous one ends when a wait, a poll or its future sees it."""


DECISIONS = ("select_victims", "lookup_prefix", "admit", "schedule")
NOTICES = (
    "on_evicted", "on_prefix_matched", "on_prefix_stored", "on_prefix_released", "on_step_end", "on_request_end",
)  # fmt: skip
COMM_HOOKS = ("comm_decide", "comm_begin", "comm_end")


def overrides(plugin: Plugin, hook: str) -> bool:
    """Return whether the plug-in overrides this hook."""
    return getattr(type(plugin), hook) is not getattr(Plugin, hook)
