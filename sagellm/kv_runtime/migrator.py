"""Moves the bytes of blocks between stores, in the background, in two phases and up to a deadline."""

import heapq
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from sagellm.core.errors import TierError
from sagellm.core.hooks import MigrationPlan, MigrationResult, Tier
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.base import BlockBytes, StoredBlock, StoreFullError, TierStore
from sagellm.kv_runtime.migration_job import MigrationJob

__all__ = ["KVMigrator", "MoveCount"]

SPEED = {Tier.GPU: 0, Tier.CPU: 1, Tier.NVME: 2}  # fastest first
NUM_SAMPLES = 256
CHUNK_BLOCKS = 8  # go through their phases together: between two copies little else has to come into the caches
NO_DIGESTS: Mapping[BlockKey, bytes] = {}


class MoveCount(NamedTuple):
    """Blocks and bytes of one pair of tiers with one outcome: "moved", or why not, as in `KVMigrator`."""

    src_tier: Tier
    dst_tier: Tier
    outcome: str
    num_blocks: int
    num_bytes: int


class KVMigrator:
    """Moves blocks between stores, one for each tier.

    For each block room is prepared at the target, the bytes are copied there, checked where the source can lose them,
    committed, and only then removed from the source. After any earlier fault the target has no trace of it and the
    source has the block. Loads, towards a faster tier, go before saves; else first come, first served.

    Reasons of a refusal: "missing" (the source does not have the block, or another one with this key), "full" (the target),
    "in flight" (another move has the block), "queue full", "deadline", "cancelled", "closed", or "failed: " with what the
    store said.

    A deadline also holds when a store hangs: the future ends in time, and what the hanging thread completes later is undone.
    Until then its blocks are in flight, and it cannot do other work.

    Args:
        stores: that blocks are moved between; they stay their owner's, who closes them after the migrator.
        num_threads: moves that can go on at a time.
        max_queued_bytes: of what was not finished; beyond it plans are refused, so that a slow device cannot pile them up.

    Raises:
        TierError: no thread, or two stores of one tier.
    """

    def __init__(self, stores: Iterable[TierStore], *, num_threads: int = 2, max_queued_bytes: int = 1 << 30) -> None:
        stores = list(stores)
        self._stores = {store.tier: store for store in stores}
        if num_threads < 1 or len(self._stores) < len(stores):
            tiers = ", ".join(store.tier.value for store in stores)
            raise TierError(
                f"{num_threads} threads, stores for {tiers}; a migrator needs 1 thread and one store a tier."
            )
        self._max_queued_bytes = max_queued_bytes
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._alarm = threading.Condition(self._lock)
        self._finished = threading.Condition(self._lock)
        self._loads: deque[MigrationJob] = deque()
        self._saves: deque[MigrationJob] = deque()
        self._open_jobs: set[MigrationJob] = set()
        self._deadlines: list[tuple[float, int, MigrationJob]] = []
        self._numbers = itertools.count()
        self._in_flight: set[BlockKey] = set()
        self._queued_bytes: Counter[tuple[Tier, Tier]] = Counter()
        self._counts: dict[tuple[Tier, Tier, str], list[int]] = {}
        self._samples: dict[tuple[Tier, Tier], deque[tuple[int, float]]] = {}
        self._is_closed = False
        names = [f"kv-migrator-{number}" for number in range(num_threads)]
        # Daemons: a thread that hangs in a dead device must not keep the process from ending.
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        self._threads.append(threading.Thread(target=self._watch, name="kv-migrator-deadlines", daemon=True))
        for thread in self._threads:
            thread.start()

    def migrate(
        self,
        plan: MigrationPlan,
        *,
        deadline_s: float | None = None,
        keep_source: bool = False,
        digests: Mapping[BlockKey, bytes] = NO_DIGESTS,
        on_done: Callable[[MigrationResult], None] | None = None,
    ) -> Future[MigrationResult]:
        """Move the blocks whose keys are `plan.block_ids`. Returns at once.

        Args:
            deadline_s: seconds from now after which what is not moved is refused; None for none.
            keep_source: leave the blocks at the source too.
            digests: by key, of the blocks that are meant; one that is there under another digest is "missing".
            on_done: called with the result on some thread, the caller's among them, as soon as nothing touches the memory of
                the blocks any more. That is when the future ends, or after it where a store hangs.

        The future ends with a result, never with an error. Callbacks at its end must be quick, as must `on_done`.
        `future.cancel()` works until then; blocks that were moved before stay moved, and `on_done` tells which.

        Raises:
            TierError: a tier without a store, or twice the same.
        """
        if plan.src_tier == plan.dst_tier or not {plan.src_tier, plan.dst_tier} <= self._stores.keys():
            known = ", ".join(tier.value for tier in self._stores)
            raise TierError(
                f"no move from tier {plan.src_tier.value} to {plan.dst_tier.value}; this migrator has stores for {known}."
            )
        job = MigrationJob(
            plan, self._stores[plan.src_tier], self._stores[plan.dst_tier],
            deadline=None if deadline_s is None else time.monotonic() + deadline_s, keep_source=keep_source, on_done=on_done,
        )  # fmt: skip
        known_blocks = _describe(job, digests)
        with self._lock:
            self._accept(job, known_blocks)
            if job.blocks:
                self._queue(job)
        if job.blocks:
            job.future.add_done_callback(lambda future: self._settle(job, "cancelled") if future.cancelled() else None)
        else:
            self._settle(job, "")
        return job.future

    def _accept(self, job: MigrationJob, blocks: dict[BlockKey, StoredBlock]) -> None:
        """The job reserves the blocks that can be moved; the rest is refused. With the lock held."""
        num_bytes = sum(stored.block.size_bytes for stored in blocks.values())
        is_full = self._queued_bytes.total() + num_bytes > self._max_queued_bytes
        for key, stored in blocks.items():
            if self._is_closed or is_full or key in self._in_flight:
                job.refuse(key, "closed" if self._is_closed else "queue full" if is_full else "in flight")
            else:
                job.blocks[key] = stored
        self._open_jobs.add(job)
        if not job.blocks:
            return
        self._in_flight.update(job.blocks)
        job.num_bytes = sum(stored.block.size_bytes for stored in job.blocks.values())
        self._queued_bytes[job.plan.src_tier, job.plan.dst_tier] += job.num_bytes

    def _queue(self, job: MigrationJob) -> None:
        """For a thread of this migrator. With the lock held."""
        is_load = SPEED[job.plan.dst_tier] < SPEED[job.plan.src_tier]
        (self._loads if is_load else self._saves).append(job)
        self._work.notify()
        if job.deadline is not None:
            heapq.heappush(self._deadlines, (job.deadline, next(self._numbers), job))
            self._alarm.notify()

    def queued_bytes(self, src_tier: Tier, dst_tier: Tier) -> int:
        """Bytes of unfinished moves between these tiers."""
        with self._lock:
            return self._queued_bytes[src_tier, dst_tier]

    def samples(self, src_tier: Tier, dst_tier: Tier) -> list[tuple[int, float]]:
        """(bytes, seconds) of the last moves of a few blocks between these tiers, at most `NUM_SAMPLES`, oldest first."""
        with self._lock:
            return list(self._samples.get((src_tier, dst_tier), ()))

    def counts(self) -> list[MoveCount]:
        """Every block that was asked for and is done with; "failed" without what the store said."""
        with self._lock:
            return [MoveCount(*key, *numbers) for key, numbers in sorted(self._counts.items())]

    def close(self, timeout_s: float = 10.0) -> None:
        """Refuse what was not moved, and wait until nothing is prepared any more. A second call does nothing more.

        Raises:
            TierError: a store still hangs after `timeout_s`.
        """
        with self._lock:
            self._is_closed = True
            jobs = list(self._open_jobs)
            self._work.notify_all()
            self._alarm.notify_all()
        for job in jobs:
            self._settle(job, "closed")
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            self._finished.wait_for(lambda: not self._num_started(), max(0.0, end - time.monotonic()))
            num_hanging = self._num_started()
        if num_hanging:
            raise TierError(
                f"{num_hanging} moves hang in a store; look at its device, and end the process if they stay."
            )

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._carry_out(job)

    def _num_started(self) -> int:
        """Moves that somebody is in the middle of. With the lock held."""
        return sum(job.is_started for job in self._open_jobs)

    def _carry_out(self, job: MigrationJob) -> None:
        if not job.start():
            return
        blocks = list(job.blocks.items())
        try:
            for first in range(0, len(blocks), CHUNK_BLOCKS):
                _move(job, blocks[first : first + CHUNK_BLOCKS])
            job.settle("")
        except Exception as error:  # a store that cannot even abort: this thread still has other work
            job.settle(_reason(error))
        self._finish(job)

    def _next(self) -> MigrationJob | None:
        with self._lock:
            while not self._loads and not self._saves:
                if self._is_closed:
                    return None
                self._work.wait()
            return (self._loads or self._saves).popleft()

    def _settle(self, job: MigrationJob, reason: str) -> None:
        """End a job from outside. If a worker has it, that one finishes it when it comes out of its store."""
        if not job.settle(reason):
            return
        if job.is_started:
            job.announce()
        else:
            self._finish(job)

    def _finish(self, job: MigrationJob) -> None:
        """The job is settled and no worker is in it: its blocks are free for other moves, and then everybody is told."""
        pair = (job.plan.src_tier, job.plan.dst_tier)
        result = job.result()
        with self._lock:
            self._open_jobs.discard(job)
            self._finished.notify_all()
            self._in_flight.difference_update(job.blocks)
            self._queued_bytes[pair] -= job.num_bytes
            self._samples.setdefault(pair, deque(maxlen=NUM_SAMPLES)).extend(job.samples)
            for key, outcome in [*((key, "moved") for key in result.moved), *result.refused.items()]:
                numbers = self._counts.setdefault((*pair, outcome.partition(":")[0]), [0, 0])
                numbers[0] += 1
                numbers[1] += job.blocks[BlockKey(key)].block.size_bytes if key in job.blocks else 0
        job.announce()
        job.tell()

    def _watch(self) -> None:
        """Settle jobs at their deadlines, whatever the workers are stuck in."""
        while True:
            with self._lock:
                if self._is_closed:
                    return
                if not self._deadlines or self._deadlines[0][0] > (now := time.monotonic()):
                    self._alarm.wait(self._deadlines[0][0] - now if self._deadlines else None)
                    continue
                job = heapq.heappop(self._deadlines)[2]
            self._settle(job, "deadline")


def _describe(job: MigrationJob, digests: Mapping[BlockKey, bytes]) -> dict[BlockKey, StoredBlock]:
    """The blocks of the job's plan as the source has them; the others are refused."""
    blocks: dict[BlockKey, StoredBlock] = {}
    for key in map(BlockKey, job.plan.block_ids):
        if key in blocks:
            continue
        try:
            stored = job.source.describe(key)
        except KeyError:
            job.refuse(key, "missing")
            continue
        wanted = digests.get(key, b"")
        if wanted and wanted != stored.digest:
            job.refuse(key, "missing")
        else:
            blocks[key] = stored
    return blocks


def _move(job: MigrationJob, blocks: list[tuple[BlockKey, StoredBlock]]) -> None:
    """Move a few blocks: room for all, then all copies, then all commits. A failure of any kind is its block's refusal."""
    start = time.perf_counter()
    rooms = [(key, stored, room) for key, stored in blocks if (room := _prepare(job, key, stored)) is not None]
    copied = _copy_each(job, rooms)
    num_bytes = sum(stored.block.size_bytes for key, stored in copied if _commit(job, key))
    if num_bytes:
        job.samples.append((num_bytes, time.perf_counter() - start))


def _prepare(job: MigrationJob, key: BlockKey, stored: StoredBlock) -> BlockBytes | None:
    """Room at the target; None where it is refused, or too late."""
    if job.is_over():
        return None
    try:
        return job.target.prepare(stored.block, stored.digest)
    except Exception as error:
        job.refuse(key, _reason(error))
        return None


def _copy_each(
    job: MigrationJob, rooms: list[tuple[BlockKey, StoredBlock, BlockBytes]]
) -> list[tuple[BlockKey, StoredBlock]]:
    """The blocks whose bytes are in their rooms now; the other rooms are given back."""
    copied: list[tuple[BlockKey, StoredBlock]] = []
    for key, stored, room in rooms:
        if not job.is_over():
            try:
                job.source.read(key, room, stored.digest)
            except Exception as error:
                job.refuse(key, _reason(error))
            else:
                copied.append((key, stored))
                continue
        job.target.abort(key)
    return copied


def _commit(job: MigrationJob, key: BlockKey) -> bool:
    """Whether the block is at the target now, and in time."""
    if job.is_over():
        job.target.abort(key)
        return False
    try:
        job.target.commit(key)
    except Exception as error:
        job.refuse(key, _reason(error))
        return False
    if not job.moved(key):
        _remove(job.target, key)  # the future has said that it is not there
        return False
    if not job.keep_source:
        _remove(job.source, key)  # the move is done whether or not the source can forget it
    return True


def _remove(store: TierStore, key: BlockKey) -> None:
    try:  # noqa: SIM105, for each block `suppress` takes a tenth of all that is not copying
        store.remove(key)
    except (KeyError, TierError):
        pass


def _reason(error: Exception) -> str:
    if isinstance(error, StoreFullError):
        return "full"
    if isinstance(error, KeyError):
        return "missing"
    return f"failed: {error if isinstance(error, TierError) else repr(error)}"
