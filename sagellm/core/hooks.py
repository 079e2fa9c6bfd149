"""The hook contract: what an engine tells a plug-in, and what a plug-in may decide. No engine is named here.

A plug-in is a subclass of `Plugin` that overrides the hooks it wants. Hooks whose name starts with `on_` are notices;
the others are decisions, and a decision has one owner: two plug-ins that decide the same thing are refused at start.
Every array given to a plug-in is read-only.

`on_evicted` and `on_request_end` are told at once, but for what another plug-in drops (`EngineHandle.drop_blocks`). Those and
the other notices arrive in order with the plug-in's next call, at the
latest with the first step that the engine chooses after `COALESCE_S`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, NewType, Protocol

import numpy as np

from sagellm.core.scheduling import (
    Phase,
    RequestId,
    RequestMetadata,
    ScheduleDecision,
    ServiceLevel,
    StepResult,
    StepView,
)
from sagellm.core.victims import VictimRequest

__all__ = [
    "COALESCE_S", "COMM_HOOKS", "DECISIONS", "NOTICES", "AllocationResult", "BlockCounts", "BlockId", "BlockState", "CommOp",
    "EngineHandle", "EvictionDecision", "EvictionNotice", "EvictionReason", "KVBlockInfo", "MigrationPlan", "MigrationResult",
    "Phase", "Plugin", "PrefixMatch", "PrefixQuery", "PrefixRelease", "PrefixUpdate", "RequestId", "RequestMetadata",
    "ScheduleDecision", "ServiceLevel", "StepResult", "StepView", "Tier", "VictimRequest", "overrides",
]  # fmt: skip

COALESCE_S = 0.01

BlockId = NewType("BlockId", int)


class Tier(str, Enum):
    """Where a block's bytes lie. `GPU` is the engine's own pool, also when that pool is the memory of a CPU device."""

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


@dataclass(frozen=True, slots=True)
class KVBlockInfo:
    """One block. `size_bytes` counts all layers, keys and values; `last_access` is a counter, larger is more recent."""

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
    """Blocks of the engine's pool: free + cached + active == total. Host slots are counted apart."""

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
    """`moved` in the order asked; `refused` maps the others to the reason."""

    moved: tuple[int, ...]
    refused: dict[int, str]


class EvictionDecision(NamedTuple):
    """What to give up, first to last. `reason`: of the whole choice; `reasons`: one for each victim, or none at all."""

    victims: Sequence[int]
    reason: str = ""
    reasons: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class EvictionNotice:
    """Told before anything else is told or asked that names the ids again."""

    block_ids: tuple[int, ...]
    reason: EvictionReason
    request_id: RequestId | None = None


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A request is about to be looked up. `token_ids`: int64 [n], all of its tokens."""

    request_id: RequestId
    token_ids: np.ndarray
    namespace: str
    block_size: int


def _no_hashes() -> np.ndarray:
    return np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the lookup found. `num_matched`: tokens; `block_ids`: the blocks that this lookup added.

    `block_hashes`: uint64, one for each full block of the request's tokens, of the prefix up to its end and the namespace.
    `limit`: how many blocks could have matched. `first`: this request was not looked up before. `time_s`: when, on the clock
    of `time.monotonic`. A request holds what it matched, and what it held before, until `on_prefix_released`.

    Told before anything else is asked: no victim may be among what was matched. Then those blocks that lie on a slower tier
    are brought back, the first ones first; where the pool has no room for all, `on_prefix_released` tells how many were kept.
    The others stay on the tier where they were.
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
    """Blocks were published. `token_ids`: int64 [len(block_ids) * block_size], from token `first_token` of the request.

    `block_hashes`: uint64 [len(block_ids)], `parent_hash` that of the block before the first one, as in `PrefixMatch`. A
    block that was cached before is among them again. One that took the place of a block on a slower tier has the hash of
    that one, which `on_evicted` has told before. The request holds them until `on_prefix_released`.
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


class PrefixRelease(NamedTuple):
    """A request does not hold its cached blocks any more, but for the first `num_kept`: it has ended, lost its blocks to
    others, or could not have all that it matched. `time_s`: when, on the clock of `time.monotonic`.

    Each request that `on_prefix_matched` or `on_prefix_stored` told of lets go of everything in the end, also of nothing."""

    request_id: RequestId
    num_kept: int
    time_s: float


@dataclass(frozen=True, slots=True)
class CommOp:
    """One collective on one rank. `num_bytes` is the size of the tensor given, not of what crosses the wire.

    `duration_s`: on the device, with the wait for the slowest rank; only in `comm_end`, and None where the engine does not
    measure it.
    """

    name: str
    num_bytes: int
    dtype: str
    rank: int
    world_size: int
    async_op: bool
    duration_s: float | None = None


class EngineHandle(Protocol):
    """What a plug-in may ask of its engine. Valid inside a hook only, on the thread that runs the hook.

    `block_bytes`: of one block of one worker, all layers, keys and values. `layout` names the model with its weights, the
    type and the order of these bytes: the bytes of a block mean the same where it is equal, and nothing elsewhere. Empty where
    the engine does not know.
    """

    block_size: int
    block_bytes: int
    layout: str

    def block_counts(self) -> BlockCounts: ...

    def get_block_info(self, block_ids: Sequence[int] | None = None) -> list[KVBlockInfo]:
        """Information on these blocks, or on every block in use."""
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
        """Move cached blocks; the bytes are copied before the next forward pass reads or writes them."""
        ...

    def drop_blocks(self, block_ids: Sequence[int], reasons: Sequence[str] = ()) -> tuple[int, ...]:
        """Give up cached blocks now, in any hook; their room is free when this returns. `reasons`: one for each, or none.

        Passed over is what is not cached, what a request holds, and what a cached block of its own tier continues that is not
        among them. What continues them on another tier goes too. Returns everything that went. The plug-in that asks is not
        told by `on_evicted`; the others are, with their next call.

        Raises:
            PluginError: another number of reasons, or an engine that cannot do it.
        """
        ...

    def register_eviction_callback(self, callback: Callable[[EvictionNotice], None]) -> None: ...

    @property
    def is_recording(self) -> bool:
        """Whether an event log is kept, so that lines for it are worth making."""
        ...

    @property
    def num_lost_notices(self) -> int:
        """Notices that this plug-in was too slow to hear; the oldest went first. 0 on an engine that waits for plug-ins."""
        ...

    def record(self, event: str, **fields: object) -> None:
        """Write a line into the engine's event log; nothing where none is kept."""
        ...

    def request_tokens(self, request_id: RequestId) -> tuple[np.ndarray, str]:
        """(int64 [n] tokens, namespace) of a request that the engine knows; of its tokens those that others may share.

        Raises:
            PluginError: no such request.
        """
        ...

    def host_bytes(self, block_ids: Sequence[int]) -> list[np.ndarray]:
        """uint8 [block_bytes] each: copies of cached blocks of the host tier, layer after layer, keys before values.

        The blocks may move or go while the copies are in use.

        Raises:
            PluginError: not a cached block, not on the host tier, a copy to or from it is still on its way, or the memory
                is not this process's own (tensor parallelism).
        """
        ...

    def unpin(self, block_ids: Sequence[int]) -> None:
        """What `host_bytes` gave is not needed any more. An engine that gives copies has nothing to do."""
        ...

    def reserve_host(self, count: int) -> tuple[list[int], list[np.ndarray]]:
        """(ids, uint8 [block_bytes] each, to be filled by the caller) of at most `count` free blocks of the host tier.

        The bytes get there with `adopt_host`. Raises PluginError: there is no host tier, or as `host_bytes`.
        """
        ...

    def adopt_host(self, block_ids: Sequence[int], token_ids: np.ndarray, namespace: str) -> tuple[int, ...]:
        """Make reserved blocks, filled, the last ones of the prefix `token_ids` in the cache. Those that are cached by now,
        or whose beginning is not, are freed. Returns the ids that were taken.

        Raises:
            PluginError: an id that is not reserved, or tokens of another number of blocks; nothing is changed then.
        """
        ...

    def free_host(self, block_ids: Sequence[int]) -> None:
        """Give reserved blocks back. Raises PluginError: one that is not reserved."""
        ...


class Plugin:
    """Base of every plug-in. Override what you need; a hook that is not overridden is never called.

    An instance lives in the process that schedules. With tensor parallelism each worker process has an instance of its
    own for the `comm_*` hooks, on which `attach` is not called. `options` come from the configuration.
    """

    def __init__(self, **options: object) -> None:
        if options:
            raise TypeError(f"unknown options {sorted(options)}")

    def attach(self, engine: EngineHandle) -> None:
        """Called once, before any other hook."""

    def close(self) -> None:
        """Called once, when the engine ends, or after the plug-in was switched off; the engine handle works in the first
        case only. It may take a few seconds, whatever the time limit of hooks is."""

    def report(self) -> dict[str, Any]:
        """Numbers for `/metrics`: name -> number, or -> a dict of such, nested as deep as it needs labels.

        Asked for between two steps; must be quick.
        """
        return {}

    def select_victims(self, request: VictimRequest) -> EvictionDecision | Sequence[int]:
        """Choose cached blocks to give up. Fewer than asked is allowed: the engine tops up, least recent first."""
        raise NotImplementedError

    def on_evicted(self, notice: EvictionNotice) -> None: ...

    def lookup_prefix(self, query: PrefixQuery) -> Sequence[int] | None:
        """Ids of cached blocks that hold the beginning of the query, from its first token; None: the engine looks."""
        raise NotImplementedError

    def on_prefix_matched(self, match: PrefixMatch) -> None: ...

    def on_prefix_stored(self, update: PrefixUpdate) -> None: ...

    def on_prefix_released(self, release: PrefixRelease) -> None: ...

    def admit(self, request: RequestMetadata) -> bool:
        """May this request join the queue now? Asked before each step until the answer is True."""
        raise NotImplementedError

    def schedule(self, view: StepView) -> ScheduleDecision | None:
        """Choose the phase of a step; order, hold, cut and bound its requests.

        None leaves it to the engine, and is not asked for again until a request has come or gone, or `COALESCE_S` have
        passed; `ScheduleDecision()` says the same for one step only.
        """
        raise NotImplementedError

    def on_step_end(self, result: StepResult) -> None: ...

    def on_request_end(self, request_id: RequestId) -> None: ...

    def comm_begin(self, op: CommOp) -> object:
        """Before a collective; what it returns is handed to `comm_end`."""

    def comm_end(self, op: CommOp, token: object) -> None:
        """After a collective, also one that failed: for an asynchronous one, when a wait, a poll or its future saw the end."""


DECISIONS = ("select_victims", "lookup_prefix", "admit", "schedule")
NOTICES = (
    "on_evicted", "on_prefix_matched", "on_prefix_stored", "on_prefix_released", "on_step_end", "on_request_end",
)  # fmt: skip
COMM_HOOKS = ("comm_begin", "comm_end")


def overrides(plugin: Plugin, hook: str) -> bool:
    """True if the plug-in brings its own version of this hook."""
    return getattr(type(plugin), hook) is not getattr(Plugin, hook)
