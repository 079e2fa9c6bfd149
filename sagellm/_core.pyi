"""The native half of sagellm. Use it through the packages: the prefix index is `sagellm.prefix_reuse.PrefixReuseIndex`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagellm.core.hooks import EvictionDecision, Tier
from sagellm.kv_policy.base import CachedBlock, PolicyContext
from sagellm.prefix_reuse.base import EntryId, Int32Array, LockId, Namespace, RemovalReason

_Tokens = Sequence[int] | NDArray[np.integer[Any]]
_Keys = Sequence[int] | NDArray[np.int64] | NDArray[np.uint64]

class PrefixHit:
    """What a lookup found: the longest cached prefix of the tokens it was given.

    Attributes:
        matched_length: tokens, a multiple of the block size; 0 for a miss.
        remaining_tokens: tokens of the query that were not matched.
        confidence: 1.0 when every matched token was compared; below that when only hashes were.
        kv_block_ids: int32 [matched_length / block_size], read-only; a copy that later changes of the index do not touch.
        tiers: int8 [matched_length / block_size], places in `TIERS`.
        entry_id: of the matched prefix if it ends where an entry does, else 0. A lookup that touches always has one.
        lock: names the lock that `lookup(lock=True)` took, else 0.
    """

    def __init__(
        self,
        *,
        kv_block_ids: _Tokens,
        tiers: Sequence[int] | NDArray[np.int8],
        matched_length: int = 0,
        remaining_tokens: int = 0,
        confidence: float = 1.0,
        entry_id: int = 0,
        lock: int = 0,
    ) -> None: ...
    @property
    def matched_length(self) -> int: ...
    @property
    def remaining_tokens(self) -> int: ...
    @property
    def confidence(self) -> float: ...
    @property
    def kv_block_ids(self) -> Int32Array: ...
    @property
    def tiers(self) -> NDArray[np.int8]: ...
    @property
    def entry_id(self) -> EntryId: ...
    @property
    def lock(self) -> LockId: ...

class PrefixRemoval:
    """Blocks that left the index, in the order they left; a block comes after all that hung below it.

    The caller frees them. `kv_block_ids`: int32 [n], read-only; `tiers`: int8 [n], places in `TIERS`.
    """

    def __init__(self, kv_block_ids: _Tokens, tiers: Sequence[int] | NDArray[np.int8]) -> None: ...
    @property
    def kv_block_ids(self) -> Int32Array: ...
    @property
    def tiers(self) -> NDArray[np.int8]: ...
    def on(self, tier: Tier | str) -> Int32Array:
        """Those of one tier."""

    def __len__(self) -> int: ...

class PrefixEntry:
    """A cached prefix, from its first token to the end of one of its blocks.

    Attributes:
        entry_id: names the prefix; 0 for the empty one. Never given out twice.
        token_hash: 64 bits of the tokens, whatever the namespace; equal in every process (`prefix_hashes`).
        token_length: tokens, a multiple of the block size.
        kv_block_ids: int32 [token_length / block_size], read-only; the blocks that hold it.
        tiers: int8 [token_length / block_size], places in `TIERS`.
        metadata: what `insert` was given for exactly this prefix, else None.
        num_new_blocks: how many blocks the call that returned this added, counted from the end.
        replaced: blocks on slower tiers whose place this insert took, which the caller frees; None if there are none.
    """

    def __init__(
        self,
        *,
        entry_id: int,
        token_hash: int,
        token_length: int,
        kv_block_ids: _Tokens,
        tiers: Sequence[int] | NDArray[np.int8],
        metadata: dict[str, Any] | None = None,
        num_new_blocks: int = 0,
        replaced: PrefixRemoval | None = None,
    ) -> None: ...
    @property
    def entry_id(self) -> EntryId: ...
    @property
    def token_hash(self) -> int: ...
    @property
    def token_length(self) -> int: ...
    @property
    def kv_block_ids(self) -> Int32Array: ...
    @property
    def tiers(self) -> NDArray[np.int8]: ...
    @property
    def metadata(self) -> dict[str, Any] | None: ...
    @property
    def num_new_blocks(self) -> int: ...
    @property
    def replaced(self) -> PrefixRemoval | None: ...

class PrefixIndex:
    """See `sagellm.prefix_reuse.base.PrefixIndex`. Methods with a leading underscore return plain columns."""

    def __init__(self, block_size: int = 16, *, event_capacity: int = 0, _snapshot: bytes | None = None) -> None: ...
    @property
    def block_size(self) -> int: ...
    def insert(
        self,
        tokens: _Tokens,
        kv_block_ids: _Tokens,
        namespace: str | Namespace = "",
        *,
        tier: Tier | str = "gpu",
        metadata: dict[str, Any] | None = None,
    ) -> PrefixEntry: ...
    def extend(
        self, lock: LockId, tokens: _Tokens, kv_block_ids: _Tokens, *, tier: Tier | str = "gpu"
    ) -> PrefixEntry: ...
    def lookup(
        self, tokens: _Tokens, namespace: str | Namespace = "", *, touch: bool = True, lock: bool = False
    ) -> PrefixHit: ...
    def lookup_tiers(self, tokens: _Tokens, namespace: str | Namespace = "") -> list[PrefixHit]: ...
    def unlock(self, lock: LockId) -> None: ...
    def invalidate(
        self,
        tokens: _Tokens | None = None,
        namespace: str | Namespace | None = None,
        *,
        kv_block_ids: _Tokens | None = None,
        tier: Tier | str = "gpu",
        entry_id: EntryId | None = None,
    ) -> PrefixRemoval: ...
    def evict_lru(self, num_blocks: int, tier: Tier | str = "gpu") -> PrefixRemoval: ...
    def evict(
        self, kv_block_ids: _Tokens, tier: Tier | str = "gpu", reason: RemovalReason | str = "policy"
    ) -> PrefixRemoval: ...
    def select_lru(self, num_blocks: int, tier: Tier | str = "gpu") -> Int32Array: ...
    def move(
        self, kv_block_ids: _Tokens, new_ids: _Tokens, src_tier: Tier | str, dst_tier: Tier | str
    ) -> None: ...
    def contains(self, kv_block_ids: _Tokens, tier: Tier | str = "gpu") -> NDArray[np.bool_]: ...
    def entry(self, entry_id: EntryId) -> PrefixEntry: ...
    def tokens(self, entry_id: EntryId) -> Int32Array: ...
    def namespaces(self) -> list[str]: ...
    def num_blocks(self, tier: Tier | str | None = None) -> int: ...
    def clear(self) -> None: ...
    def snapshot(self) -> bytes: ...
    def memory_bytes(self) -> int: ...
    def metrics(self) -> dict[str, Any]: ...
    def check(self) -> None:
        """Raises RuntimeError if the structure is broken. O(everything)."""

    def _blocks(self, tier: Tier | str | None, unlocked: bool) -> tuple[NDArray[Any], ...]: ...
    def _entries(self, namespace: str | Namespace | None) -> list[PrefixEntry]: ...
    def _events(self, after: int) -> tuple[list[tuple[Any, ...]], int, int]: ...

class IndexedPool:
    """See `sagellm.prefix_reuse.ReferenceIndexedPool`. Arguments of methods go by position; the arrays are kept alive.

    Raises:
        PrefixIndexError: as its twin; also for an index that is not native.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        ref_count: NDArray[np.int64],
        access_time: NDArray[np.int64],
        is_cached: NDArray[np.bool_],
        slots: NDArray[np.int64],
        free_ids: NDArray[np.int64],
        free_slots: NDArray[np.int64],
    ) -> None: ...
    def match(
        self,
        tokens: _Tokens,
        num_blocks: int,
        namespace: str | Namespace,
        lock: int,
        table: NDArray[np.int64],
        num_held: int,
        now: int,
        /,
    ) -> tuple[LockId, int, bool]: ...
    def publish(
        self, lock: LockId, tokens: _Tokens, table: NDArray[np.int64], first: int, last: int, /
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]: ...
    def evict_lru(self, num_blocks: int, /) -> NDArray[np.int64]: ...
    def give_back(self, ids: _Tokens, now: int, num_free: int, num_free_slots: int, /) -> int: ...
    def drop_lru(self, num_blocks: int, now: int, num_free: int, num_free_slots: int, /) -> int: ...
    def leave(
        self, lock: int, table: _Tokens, num_blocks: int, now: int, num_free: int, num_free_slots: int, /
    ) -> int: ...

def prefix_hashes(tokens: _Tokens, block_size: int) -> NDArray[np.uint64]:
    """uint64 [len(tokens) // block_size], a hash of each full block's whole prefix; equal in every process."""

HOOKS_ABI: int
HOOKS_CAPSULE: str

class PortQuestion:
    """What an engine asks through a `PluginPort`; columns are copies, made anew at each read.

    Attributes:
        number: names the question in `answer`.
        topic: select_victims, schedule or admit; what follows is set for its topic alone.
        count: victims wanted.
        ids, parents, depths: int32 [n], one row a cached block, ascending ids: the candidate that it continues or -1, and
            the tokens of its prefix or 0 where it is in none.
        timestamps: uint64 [n], or [0] where the engine tells nothing of its blocks.
        counts: of the engine's blocks, or None.
        seq_ids, priorities: uint64 [n], one row a sequence; the other columns of sequences are int32 [n].
        max_admitted: how many of the waiting requests fit.
        request_ids: uint64 [n], in order of arrival; `request_tokens` and `request_new_tokens` are int32 [n].
    """

    number: int
    topic: str
    engine: int
    group: int
    block_len: int
    count: int
    ids: Int32Array
    parents: Int32Array
    depths: Int32Array
    timestamps: NDArray[np.uint64]
    counts: dict[str, int] | None
    step: int
    default_budget: int
    max_budget: int
    free_blocks: int
    cached_blocks: int
    active_blocks: int
    seq_ids: NDArray[np.uint64]
    priorities: NDArray[np.uint64]
    statuses: Int32Array
    context_lens: Int32Array
    cache_lens: Int32Array
    num_blocks: Int32Array
    num_prompts: Int32Array
    max_admitted: int
    request_ids: NDArray[np.uint64]
    request_tokens: Int32Array
    request_new_tokens: Int32Array

class PortNotice:
    """What an engine told. `topic`: evicted, matched, stored, step_end or collective. `time_ns`: on time.monotonic_ns."""

    topic: str
    time_ns: int
    engine: int
    group: int
    seq_id: int
    num_tokens: int
    num_blocks: int
    first_token: int
    kind: int
    ids: Int32Array
    tokens: Int32Array
    step: int
    step_sequences: int
    step_tokens: int
    step_finished: int
    comm_op: int
    comm_bytes: int
    comm_rank: int
    comm_ranks: int
    milliseconds: float

class PluginPort:
    """Bounded questions from an engine's threads, and notices. Topics are the names above; any other is a ValueError.

    An engine waits at most `time_limit_s` for an answer; the first time it does so in vain the port is switched off. Notices
    beyond `queue_bytes` push the oldest ones out.
    """

    def __init__(self, time_limit_s: float, topics: Sequence[str], queue_bytes: int = 16 << 20) -> None: ...
    def next(self, timeout_s: float) -> tuple[list[PortNotice], PortQuestion | None] | None:
        """The next question with the notices before it, or notices alone; None once nothing will come. For one thread."""

    def answer(
        self,
        number: int,
        *,
        chosen: Iterable[int] | None = None,
        priorities: Iterable[int] | None = None,
        budget: int = 0,
    ) -> bool:
        """`chosen`: victims, or places of admitted requests. Neither it nor `priorities`: the engine decides.

        False if nobody waits for it any more. An answer that makes no sense switches the port off.
        """

    def fail(self, hook: str, kind: str, detail: str) -> None:
        """Switch it off, with this as its fault."""

    def leave(self, topics: Sequence[str]) -> None:
        """Nobody wants these any more; the engine no longer asks or tells them."""

    def close(self) -> None: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def topics(self) -> tuple[str, ...]: ...
    @property
    def fault(self) -> tuple[str, str, str] | None:
        """Hook, kind (overran, raised, nonsense) and detail of what switched it off."""

    def stats(self) -> dict[str, int]:
        """asked, answered, late, told, lost."""

class HookTable:
    """TurboMind's hooks, answered natively; what a plug-in decides goes through `port`. Never freed: engines call it."""

    def __init__(
        self,
        port: PluginPort | None = None,
        *,
        prefix: bool = True,
        victims: bool = True,
        schedule: bool = False,
        admit: bool = False,
        step_end: bool = False,
        comm: bool = False,
        time_comm: bool = False,
    ) -> None: ...
    def capsule(self) -> Any:
        """A PyCapsule named `HOOKS_CAPSULE` with the address of a `SageHooks`, for `_turbomind.sage_install`."""

    def stats(self) -> dict[str, int]: ...

def copy_pieces(
    target: NDArray[np.uint8],
    source: NDArray[np.uint8],
    dst: NDArray[np.int64],
    src: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
    deadline: float,
    stop: NDArray[np.uint8],
) -> str:
    """Copy `num_bytes[i]` bytes from `source[src[i]]` on to `target[dst[i]]` on, for every i, in order; others run meanwhile.

    `deadline` (of `time.monotonic()`) and `stop` [1] (not 0: end) are looked at every 0.5 MiB; nothing is written afterwards.
    Returns "done", "deadline" or "stopped". Memories must not overlap. Raises IndexError, with nothing written: a piece
    that does not lie within both; ValueError: lists of different lengths, a target that is read-only.

    Pieces of 4 KiB or more, of lists of 256 KiB or more, are written past the processor's caches.
    """

class KVStrides:
    """Where heads that lie side by side, `run_bytes` of each token, lie in the KV blocks of two engines.

    `src`, `dst`: of each side the bytes of a layer, the tokens of a block, the bytes of a token, and where in a token the first
    of these heads begins.
    """

    def __init__(
        self, num_layers: int, src: tuple[int, int, int, int], dst: tuple[int, int, int, int], run_bytes: int
    ) -> None: ...
    def pieces(
        self, src_blocks: NDArray[np.int64], src_start: int, dst_blocks: NDArray[np.int64], dst_start: int, first: int, num: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Offsets in the source and in the target, and numbers of bytes, [n] each, of tokens `first` to `first + num`, layer by
        layer. The blocks' first tokens are `src_start` and `dst_start`. Neighbours on both sides are one piece.

        Raises IndexError: the blocks do not cover the tokens.
        """

    def copy_tokens(
        self,
        targets: Sequence[NDArray[np.uint8]],
        sources: Sequence[NDArray[np.uint8]],
        src_blocks: NDArray[np.int64],
        src_start: int,
        dst_blocks: NDArray[np.int64],
        dst_start: int,
        first: int,
        num: int,
        deadline: float,
        stop: NDArray[np.uint8],
    ) -> str:
        """`copy_pieces` of all `pieces`, from each source into its target: parts of this geometry, in one call.

        Raises as both do, with nothing written.
        """

def policy_names() -> list[str]:
    """The names that `NativePolicy`, `ObjectCache` and the replays know."""

class NativePolicy:
    """An eviction policy as `sagellm.kv_policy.base.EvictionPolicy` has it; use it through `sagellm.kv_policy.eviction.native`.

    Args:
        name: one of `policy_names()`.
        capacity: blocks, 1 to 2**30.
        options: the policy's own, numbers by name; `future` of belady is an array of keys.

    Raises:
        PolicyError: an unknown name or option, a value out of its range; in events, a key that is on the tier already, is not,
            or (belady) was not foreseen, or a block that is none; anything while a question is open.
    """

    def __init__(self, name: str, capacity: int, options: Mapping[str, Any] | None = None) -> None: ...
    def on_insert(self, block: CachedBlock) -> None: ...
    def on_hit(self, key: int, time_s: float = 0.0) -> None: ...
    def on_remove(self, key: int, evicted: bool = True) -> None: ...
    def select_victims(self, context: PolicyContext) -> EvictionDecision: ...

class ObjectCache:
    """A flat cache of equal objects under a policy: what is not there is put there, if need be in the place of a victim.

    Keys are integers of 64 bits; negative ones count modulo 2**64. One thread at a time (RuntimeError). Arguments and
    `PolicyError` as of `NativePolicy`.
    """

    def __init__(self, name: str, capacity: int, options: Mapping[str, Any] | None = None) -> None: ...
    def access(self, key: int) -> bool:
        """Whether the object was there. It is now."""

    def access_many(self, keys: _Keys) -> NDArray[np.bool_]:
        """`access` of int64 or uint64 [n] in order, as bool [n]. Other threads run meanwhile."""

    def keys(self) -> NDArray[np.uint64]:
        """[len] of the objects that are there, in no order."""

    def __len__(self) -> int: ...
    def __contains__(self, key: int) -> bool: ...
    @property
    def num_evicted(self) -> int: ...

def replay_objects(
    name: str, capacity: int, keys: _Keys, options: Mapping[str, Any] | None = None
) -> NDArray[np.bool_]:
    """Hits of a new `ObjectCache`, bool [n]. The policy belady has `keys` for its future unless it is given one."""

class PrefixReplayResult:
    """What requests found. Arrays have a value for each request, [r].

    Attributes:
        hit_blocks: int32, leading blocks that were there at its first admission.
        retries: int64, how often it was admitted again because another one's output took its place.
        retry_hit_blocks, retry_blocks: int64, blocks found and blocks looked up at those.
        num_evicted: blocks given up to make room.
        num_evicted_soon: of these, those that came back before `soon` further block accesses had passed.
        num_preempted: requests that had to give way.
        num_oversized: requests of more blocks than there is room for; the blocks beyond took no part.
    """

    @property
    def hit_blocks(self) -> NDArray[np.int32]: ...
    @property
    def retries(self) -> NDArray[np.int64]: ...
    @property
    def retry_hit_blocks(self) -> NDArray[np.int64]: ...
    @property
    def retry_blocks(self) -> NDArray[np.int64]: ...
    @property
    def num_evicted(self) -> int: ...
    @property
    def num_evicted_soon(self) -> int: ...
    @property
    def num_preempted(self) -> int: ...
    @property
    def num_oversized(self) -> int: ...

def replay_prefix(
    name: str,
    capacity: int,
    keys: _Keys,
    offsets: _Keys,
    *,
    running: int = 1,
    output_blocks: _Tokens | None = None,
    times_s: Sequence[float] | NDArray[np.float64] | None = None,
    soon: int | None = None,
    options: Mapping[str, Any] | None = None,
    block_bytes: float = 1.0,
) -> PrefixReplayResult:
    """Replay requests on one tier as an engine with a prefix cache would: locked while they run, leaves go first.

    Args:
        name, capacity, options: of the policy. belady knows the rows that were not admitted yet, and no retries.
        keys: uint64 [n], of all requests, each request's first block first. A key names its whole prefix.
        offsets: int64 [r + 1], where each request's keys begin.
        running: requests at once; the one admitted first ends before the next.
        output_blocks: int32 [r], blocks without a key that a request grows by while it runs.
        times_s: float64 [r]; no policy here goes by them.
        soon: block accesses; the default is the capacity.
        block_bytes: of keys and values of a block, for policies that go by size.

    Raises:
        PolicyError: as `NativePolicy`; offsets that do not fit, a key after two different ones.
        CapacityError: requests whose outputs preempt each other for good.
    """

class NgramIndex:
    """The places of the n-grams of one text; `sagellm.accel.speculative.ngram` says how it guesses.

    Tokens are 0 to 2**31 - 1, as int64 [n] or a list (ValueError). One thread at a time (RuntimeError).

    Args:
        min_n, max_n: 1 <= min_n <= max_n <= 32 (ValueError).
    """

    def __init__(self, min_n: int, max_n: int) -> None: ...
    def append(self, tokens: _Tokens) -> None:
        """The text goes on. O(max_n) a token."""

    def follow(self, tokens: _Tokens) -> None:
        """Make this the text: what it has more is appended; if it begins otherwise, all is built anew."""

    def propose(self, tokens: _Tokens, limit: int) -> list[int]:
        """Up to `limit` guesses of what follows `tokens`, which is followed first unless its length and end are the text's."""

    def tokens(self, start: int = 0) -> Int32Array:
        """The text from there, a copy."""

    def __len__(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

class SuffixIndex:
    """The suffix tree of one text, with counts; `sagellm.accel.speculative.suffix` says how it guesses.

    Tokens, `append`, `follow`, `tokens` and threads as of `NgramIndex`.

    Args:
        max_depth: of the tree, 2 to 128 (ValueError).
    """

    def __init__(self, max_depth: int) -> None: ...
    def append(self, tokens: _Tokens) -> None: ...
    def follow(self, tokens: _Tokens) -> None: ...
    def propose(
        self, tokens: _Tokens, limit: int, min_probability: float, history: SuffixHistory | None = None
    ) -> list[int]:
        """As of `NgramIndex`; by this text and by those of `history`."""

    def propose_tree(
        self, tokens: _Tokens, limit: int, min_probability: float, history: SuffixHistory | None = None
    ) -> tuple[list[int], list[int], list[float]]:
        """Return the `limit` likeliest guesses as a tree: tokens, the parent of each or -1, and the chance of its path."""

    def tokens(self, start: int = 0) -> Int32Array: ...
    def __len__(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

class SuffixHistory:
    """One suffix tree of texts that have ended, `max_tokens` tokens at most, the oldest text dropped first.

    Args:
        max_depth: of the tree, 2 to 128 (ValueError).
        max_tokens: 0 to 2**28 (ValueError).
    """

    def __init__(self, max_depth: int, max_tokens: int) -> None: ...
    def add(self, tokens: _Tokens) -> None:
        """A text; the last `max_tokens` of it if it is longer."""

    def __len__(self) -> int:
        """Tokens that are held."""

    @property
    def num_bytes(self) -> int: ...

class ShmSegment:
    """Shared memory of a group of processes, without a name; `sagellm.comm_backend.shm`."""

    @staticmethod
    def create(world_size: int, ring_bytes: int, staging_bytes: int, heap_bytes: int) -> ShmSegment:
        """Sizes are rounded up to whole pages, the ring to a power of two. Raises CommError: no such memory."""

    @staticmethod
    def open(pid: int, fd: int, token: int) -> ShmSegment:
        """The one that a process holds as that file. Raises CommPeerError: it has gone; CommError: it cannot be had."""

    def release_fd(self) -> None:
        """From now on nobody can open it; who has it keeps it."""

    @property
    def fd(self) -> int: ...
    @property
    def token(self) -> int: ...
    @property
    def world_size(self) -> int: ...

class ShmGroup:
    """One rank of a group. `deadline`s are of `time.monotonic()`; what waits releases the GIL and hears Ctrl-C.

    One thread at a time may send to a rank, one receive from a rank, one meet. Whatever fails breaks the group, for all ranks.

    Raises:
        CommTimeoutError, CommPeerError, CommError: as in `sagellm.comm_backend.base`.
    """

    def __init__(self, segment: ShmSegment, rank: int, chunk_bytes: int, spin_s: float) -> None: ...
    def join(self, deadline: float) -> None:
        """Until all ranks have."""

    def post(self, to: int, data: int, num_bytes: int, label: str, deadline: float) -> int:
        """Send the bytes at address `data`. `label` says what they are, and is the receiver's.

        Returns what `wait_read` takes, for they may not be written until it has returned; 0 if they may at once.
        """

    def can_post_at_once(self, to: int, data: int, num_bytes: int) -> bool:
        """Whether it lies in the heap, is large enough to be left there, and `post` waits for nothing to say so."""

    def wait_read(self, to: int, position: int, deadline: float) -> None:
        """Until that rank has read what was posted."""

    def recv(self, source: int, data: int, num_bytes: int, label: str, deadline: float) -> None: ...
    def meet(self, label: str, deadline: float) -> None:
        """Until all ranks have come with this label; what they wrote to the staging before is seen after it."""

    def staging(self) -> NDArray[np.uint8]:
        """[world_size * 2 * staging_bytes], of all ranks, the same memory for all; it may outlive the group."""

    def next_half(self, deadline: float) -> int:
        """Return the half of the staging, 0 or 1, for the next chunk of a collective, once all have read what was there.

        All ranks ask as often.
        """

    def add_up(self, numbers: int, count: int, dtype: str, label: str, deadline: float) -> None:
        """Replace numbers [count] by their sums over the ranks, in the order of ranks and in float32.

        Args:
            numbers: address.
            dtype: float32 or bfloat16.
        """

    def gather(self, own: int, num_bytes: int, all: int, label: str, deadline: float) -> None:
        """Write what each rank gives, [num_bytes], to address `all`, [ranks][num_bytes]."""

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """[num_bytes] > 0 in this rank's heap, until the array is forgotten. Raises CommError: no such place."""

    def fail(self, text: str) -> None:
        """Break the group, unless it is broken already."""

    def close(self) -> None: ...

class Exchange:
    """How ranks that split a model's layers exchange float32 numbers in the middle of a step."""

    def gather(self, numbers: int, rows: int, columns: int, part: int) -> None:
        """Complete the numbers [rows][columns] at an address. Each rank has `part` columns of them, the last one maybe less."""

class CallbackExchange(Exchange):
    """Calls functions of Python with addresses and a count, on any thread. `begin_sum` returns what waits for its end."""

    def __init__(
        self,
        add_up: Callable[[int, int], None],
        begin_sum: Callable[[int, int], Callable[[], object]],
        gather: Callable[[int, int, int, int], None],
    ) -> None: ...

class ShmExchange(Exchange):
    """Exchanges over a group's shared memory, without Python.

    Args:
        bounds_ns: upper bounds of the latencies that are counted apart, rising.
        delay_ns: what an exchange takes at least, to try what a slower link does.
    """

    def __init__(self, group: ShmGroup, timeout_s: float, bounds_ns: list[int], delay_ns: int = 0) -> None: ...
    def sums(self) -> dict[str, Any]:
        """Return `count`, `bytes`, `ns`, `exposed_ns` and `latency_counts` since the start.

        `ns` are from begin to end, `exposed_ns` the caller's own. There is a count for each bound, and one for the rest.
        """

    def gatherings(self) -> dict[str, Any]:
        """Return the same of gatherings."""

class CpuTeam:
    """Threads that compute the chunks of a step together; they sleep between two steps.

    A thread that lost its time slice holds up nobody: another one computes its chunk again.
    """

    def __init__(self, threads: int) -> None:
        """Raises ValueError: fewer than 1 or more than 1,024."""

    @property
    def threads(self) -> int: ...
    @property
    def repeated(self) -> int:
        """Number of chunks that were computed again."""

class CpuKernels:
    """Kernels of one instruction set for weights of one dtype. Tensors come as addresses.

    A packed weight is made of tiles of 32 outputs: [inputs][32] of float32, [inputs / 2][32][2] of bfloat16.
    """

    def __init__(self, dtype: str, isa: str = "") -> None:
        """`dtype`: float32 or bfloat16. `isa`: plain, avx2, avx512, avx512_bf16 or amx; the best of this processor if empty.

        Raises ValueError: another name, or this processor lacks it.
        """

    @property
    def isa(self) -> str: ...
    @property
    def has_8_bits(self) -> bool:
        """Whether there are products of inputs rounded to 8 bits."""
    def packed_bytes(self, outputs: int, inputs: int) -> int: ...
    def pack(self, source: int, stride: int, outputs: int, inputs: int, packed: int) -> None:
        """Pack [outputs, inputs], `stride` numbers from row to row."""

    def multiply(
        self, team: CpuTeam, matrix: dict[str, int], gate: str, input: int, rows: int, out: int, outputs: int, wide: bool
    ) -> None:
        """out[rows][outputs] = input[rows][inputs] weight^T + bias. `out` is float32 if `wide`.

        Args:
            matrix: weight and bias (addresses, bias 0 for none), outputs, inputs; for few bits, `bits` and `block`, and
                `in_8_bits` to round inputs too.
            gate: silu or gelu: tiles of gates and of factors in turn; the result is act(gate) * factor. Else empty.
        """

    def sample(self, logits: int, wishes: dict[str, Any]) -> list[tuple[int, list[float], list[int]]]:
        """Draw a token from each row of float32 logits, [rows][vocabulary].

        Args:
            wishes: `rows`, `vocabulary` and `num_logprobs` (-1: none at all); lists with an entry for each row, or absent:
                `temperature`, `repetition_penalty`, `top_p`, `min_p`, `top_k` (0: all), `seeds` and `offsets` (absent: the
                likeliest token); `seen`, which the penalty is for, `forbidden` and its `forbidden_marks`: lists of as many
                entries for each row, one after the other.

        Returns:
            Of each row its token, and of that and the likeliest ones the log probabilities and the tokens.
        """

class CpuDecoder:
    """A decoder-only transformer over a paged KV cache, one call a step. `sagellm.engines.lmdeploy.cpu.compiled` makes one."""

    def __init__(
        self,
        kernels: CpuKernels,
        shape: dict[str, int | float | str],
        layers: list[dict[str, int | dict[str, int]]],
        embedding: dict[str, int],
        last_norm: int,
        head: dict[str, int],
    ) -> None: ...
    def bind(self, cache: dict[str, Any]) -> None:
        """Use this cache. `sagellm.engines.lmdeploy.cpu.cache.describe` makes the addresses, strides and names."""

    @property
    def takes_trees(self) -> bool:
        """Whether a step may have `parents`: the cache is plain, and at most 15 heads share a key head."""

    def move(self, slots: list[tuple[int, int]]) -> None:
        """Copy keys and values of all layers from slot to slot, in order. Token t of block b is slot b * block_size + t.

        Raises ValueError: a slot outside of the cache, or numbers of few bits.
        """

    @staticmethod
    def advance(tensors: dict[str, int], tokens: list[int]) -> int:
        """Turn a step without guesses into the one after it, in place.

        Args:
            tensors: as `run` has them.
            tokens: the token that each sequence has drawn.

        Returns:
            The number of positions that need angles.

        Raises ValueError: not one token for each sequence.
        """

    def run(
        self, team: CpuTeam, tensors: dict[str, int], wishes: dict[str, Any] | None = None,
        sparse: dict[str, Any] | None = None,
        exchanges: list[tuple[Exchange, int]] | None = None,
    ) -> tuple[list[tuple[int, list[float], list[int]]], str]:
        """Write the hidden states [tokens][hidden] of the sequences' new tokens, and their keys and values.

        Args:
            tensors: numbers `num_tokens`, `num_sequences`, `table_width`, `num_angles`; addresses of int64 `tokens` and
                `positions` [tokens], `query_lengths` and `lengths` [sequences], `tables` [sequences][table_width], of
                float32 `angles` [num_angles][cos and sin][head size] and of `hidden`, or 0. `is_decoding`: the new tokens
                are last ones and guesses, not parts of prompts. Both get the same numbers in any batch. `share_prefixes`: read
                keys that sequences have in common, by their first blocks, once.
                `parents`: address of int64 [tokens], the parent of each new token among those of its sequence, -1 of the first
                one. It comes before them. A token sees the cache and its ancestors. Without it, a token sees all before it.
            wishes: as `CpuKernels.sample` has them, to draw a token behind each new one; the first result is then the same.
            sparse: how the blocks that attention reads are chosen, as `SparseSteps.of_layers` makes it.
            exchanges: of ranks that split the model: for each layer, who adds up its parts, and in how many pieces.

        Returns:
            What was drawn, and what was wrong with a choice of blocks; the other results are then not to be used.

        Raises ValueError: tokens, lengths, positions or blocks outside of the model and the cache.
        """
