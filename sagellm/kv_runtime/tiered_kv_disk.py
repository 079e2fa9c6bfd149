"""`TieredKV` with a tier of files below the host tier: blocks that leave the host are written, and read again for a request
that waits and begins with them."""

import hashlib
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from sagellm.core.errors import PluginError, TierError
from sagellm.core.hooks import (
    BlockId,
    EngineHandle,
    MigrationPlan,
    MigrationResult,
    PrefixUpdate,
    RequestId,
    RequestMetadata,
    Tier,
)
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.costs import Copies
from sagellm.kv_runtime.hierarchy import TierSpec
from sagellm.kv_runtime.loads import Load, Waits
from sagellm.kv_runtime.opening import Opening
from sagellm.kv_runtime.tiered_kv import TieredKV

__all__ = ["TieredKVWithDisk", "token_digests"]

PAUSE_S = 10.0  # nothing is saved for so long after a write failed, and nothing loaded after a load was late
CLOSE_S = 1.0  # how long moves that are under way may take to end
SAVE_REST_S = 3.0  # how long `close` goes on saving what lies on the host
SAVED_AT_ONCE = 16
GRACE_S = 0.25  # how long after the deadline of a load the answer that it is late may take
ADOPTED_AT_ONCE = 1000  # blocks of an earlier run that a hook tells to the books
MAX_BLOCKS = 1 << 24  # of a policy's books in memory; 64 TiB of blocks of 4 MiB
OPEN_WAIT_S = 0.2  # for the folder, before the engine goes on without it for a while


def capacity_blocks(gib: float, block_bytes: int) -> int:
    """How many blocks of this size the tier has room for, at most `MAX_BLOCKS`."""
    from sagellm.kv_runtime.disk_store_format import record_bytes

    return min(int(gib * 2**30) // record_bytes(block_bytes), MAX_BLOCKS)


def token_digests(tokens: np.ndarray, namespace: str, block_size: int, before: bytes = b"") -> list[bytes]:
    """For each full block 16 bytes that stand for the namespace and every token up to its end.

    `before`: the digest of the block before the first of `tokens`; none at the start of a sequence. blake2b, so nobody can
    build another sequence with the digest of this one, as they could with the 64-bit keys.
    """
    digest = before or _digest(b"sagellm kv\0" + namespace.encode())
    data = np.ascontiguousarray(tokens, np.int64).tobytes()
    size = block_size * 8
    digests = []
    for start in range(0, len(data) - size + 1, size):
        digest = _digest(digest + data[start : start + size])
        digests.append(digest)
    return digests


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class TieredKVWithDisk(TieredKV):
    """Saves and loads in the background; the engine waits for neither.

    Writing back: a block that leaves the host tier is copied at once and written later, if the migration policy finds that
    worth it. What cannot be copied at that moment, or written in time, is lost, and computed again when it is wanted. After
    a failed write nothing is saved for `PAUSE_S`; after a load that was late nothing is loaded for as long, so a device that
    hangs does not keep every request waiting.

    Loading: a request that begins with blocks of files is not admitted while they are read, up to the deadline. Others leave
    the host tier for them; the engine's own lookup then finds them. Requests that begin with the same blocks wait for the
    same load.

    A block is named by 64 bits, which people could collide, so a file also has the digest of all its tokens: a load asks for
    the blocks whose digests are those of the request's own tokens. A key stands for the tokens of one digest as long as it is
    on any tier or on its way to one; a block with the same key and other tokens is refused. What is saved are only bytes of
    blocks whose tokens the engine has told since they have their name.
    """

    name = "tiered KV with disk"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self._config.disk is None:
            raise PluginError("a KV plug-in with a disk tier needs `disk`, its folder; or use TieredKV.")
        self._opening: Opening | None = None
        self._store: Any = None  # until it is open
        self._found: list[Any] = []  # blocks of an earlier run that the books do not know yet
        self._digest_of: dict[BlockKey, bytes] = {}
        self._key_of_digest: dict[bytes, BlockKey] = {}
        self._told: set[BlockKey] = set()  # on gpu or cpu, and known to hold the tokens of its key's digest
        self._num_lost_told = 0
        self._waits = Waits(self._config.deadline_s + GRACE_S)
        self._read: list[Load] = []  # that were read, and somebody waits for
        self._done: SimpleQueue[tuple[Any, MigrationResult]] = SimpleQueue()
        self._paused_until_s = 0.0
        self._loads_paused_until_s = 0.0
        self._is_closed = False

    def _policies(self) -> list[tuple[str, dict[str, Any]]]:
        return [*super()._policies(), (self._config.disk_policy, self._config.disk_options)]

    def attach(self, engine: EngineHandle) -> None:
        """Raises PluginError or TierError: no host tier, bytes of unknown meaning, a folder that cannot be used."""
        from sagellm.kv_runtime.disk_store import DiskStore

        config, counts = self._config, engine.block_counts()
        if not counts.host_total:
            raise PluginError("a disk tier needs a host tier, through which its blocks go: set host_kv_blocks.")
        if not engine.layout:
            raise PluginError(
                "this engine does not say what the bytes of a block mean, so files of them would be a risk."
            )
        capacity_bytes, layout = int(config.disk_gib * 2**30), engine.layout
        self._capacity = capacity_blocks(config.disk_gib, engine.block_bytes)
        if not self._capacity:
            raise TierError(f"{config.disk_gib} GiB hold no block of {engine.block_bytes} bytes; raise disk_gib.")
        super().attach(engine)
        self._opening = Opening(lambda: DiskStore(config.disk, capacity_bytes, layout=layout))
        self._come_open(OPEN_WAIT_S)

    def _tiers(self) -> list[TierSpec]:
        config = self._config
        return [*super()._tiers(), TierSpec(Tier.NVME, self._capacity, config.disk_policy, config.disk_options)]

    def _come_open(self, wait_s: float = 0.0) -> None:
        """Begin to use the store once it is open. What an earlier run has left is told to the books bit by bit."""
        if self._store is None:
            from sagellm.kv_runtime.lent_store import LentStore
            from sagellm.kv_runtime.migrator import KVMigrator

            store = self._opening.result(wait_s)
            if store is None:
                return
            self._lent = LentStore(Tier.CPU, self._engine.block_counts().host_total * self._engine.block_bytes)
            self._migrator = KVMigrator([self._lent, store])
            self._store, self._found = store, store.blocks()
        if self._found:
            some, self._found = self._found[:ADOPTED_AT_ONCE], self._found[ADOPTED_AT_ONCE:]
            now_s = time.monotonic()
            own = [each for each in some if each.digest and not self._is_of_others(each.block.key, each.digest)]
            self._manager.adopted([each.block._replace(time_s=now_s) for each in own], Tier.NVME, now_s)
            adopted = {each.block.key: each.digest for each in own if self._books.is_on(each.block.key, Tier.NVME)}
            for each in some:
                if each.block.key in adopted:
                    self._bind(each.block.key, each.digest)
                else:
                    self._remove_file(each.block.key)  # of tokens that nobody can name, or another block's by now

    def close(self) -> None:
        """What lies on the host tier is saved, and what is on its way to files arrives, as far as a few seconds allow.

        Raises TierError: a move hangs in a file; the folder is free for others all the same.
        """
        try:
            if self._store is not None and not self._is_closed:
                self._is_closed = True
                with suppress(PluginError):  # after a fault the engine answers nothing any more
                    self._save_rest(time.monotonic() + SAVE_REST_S)
                self._migrator.close(CLOSE_S)
        finally:
            if self._opening is not None:
                self._opening.abandon()

    def _save_rest(self, until_s: float) -> None:
        """Parents first, since a file is of no use without those of what it continues; most recently used sequences first."""
        self._catch_up()
        books = self._books
        keys = [key for key in books.recency(Tier.CPU) if key in self._told and not books.is_on(key, Tier.NVME)]
        keys = keys[-self._capacity :]
        keys.sort(key=lambda key: books.block(key).depth)
        for first in range(0, len(keys), SAVED_AT_ONCE):
            some, now_s = keys[first : first + SAVED_AT_ONCE], time.monotonic()
            short = len(some) - self._manager.num_free(Tier.NVME)
            if short > 0:
                room = self._manager.make_room(Tier.NVME, short, some, now_s)
                self._drop_files([key for tier, key, _ in room.drop if tier is Tier.NVME], now_s)
            self._save(some[: max(self._manager.num_free(Tier.NVME), 0)], now_s)
            self._drain(until_s)
            if time.monotonic() >= until_s:
                return
        self._drain(until_s)

    def _drain(self, until_s: float) -> None:
        """Until no save is on its way."""
        while self._migrator.queued_bytes(Tier.CPU, Tier.NVME) and time.monotonic() < until_s:
            time.sleep(0.001)
        self._catch_up()

    def report(self) -> dict[str, Any]:
        moves: dict[str, dict[str, int]] = {}
        if self._store is None:
            return super().report()
        for src, dst, outcome, num_blocks, _ in self._migrator.counts():
            moves.setdefault(f"{src.value}_{dst.value}", {})[outcome] = num_blocks
        return {**super().report(), "moves": moves, "disk": self._store.counters()}

    def _copies(self) -> Copies:
        if self._store is None:
            return {}
        pairs = [(Tier.CPU, Tier.NVME), (Tier.NVME, Tier.CPU)]
        return {f"{src.value}->{dst.value}": self._migrator.samples(src, dst) for src, dst in pairs}

    # saving

    def _digests(self, update: PrefixUpdate, parent: BlockKey | None) -> Sequence[bytes]:
        before: bytes | None = b""
        if update.first_token:
            before = self._digest_of.get(parent) if parent in self._told else None
        if before is None:
            return super()._digests(update, parent)  # its beginning came while nobody listened; these are never saved
        return token_digests(update.token_ids, update.namespace, self._engine.block_size, before)

    def _is_of_others(self, key: BlockKey, digest: bytes) -> bool:
        known = self._digest_of.get(key)
        is_other = bool(known and digest and known != digest)
        self._counts["collisions"] += is_other
        return is_other

    def _set_digest(self, key: BlockKey, digest: bytes) -> None:
        self._told.discard(key)
        if digest and key in self._books and key not in self._foreign:
            self._bind(key, digest)
            self._told.add(key)

    def _bind(self, key: BlockKey, digest: bytes) -> None:
        self._digest_of[key] = digest
        self._key_of_digest[digest] = key

    def _save(self, keys: Sequence[BlockKey], now_s: float) -> None:
        if now_s < self._paused_until_s or self._store is None:
            self._counts["saves_paused"] += len(keys)
            return
        copies = {}
        for key in keys:
            digest = self._digest_of.get(key) if key in self._told else None
            if digest is None or key in self._store:
                self._counts["saves_without_digest"] += digest is None
                continue
            try:
                copies[key] = self._engine.host_bytes([self._id_of[key]])[0]
                self._lent.lend(self._books.block(key), copies[key], digest)
            except (PluginError, TierError):
                copies.pop(key, None)
                self._counts["saves_not_copied"] += 1
        if copies:
            self._manager.saving(list(copies), now_s)
            plan = MigrationPlan(Tier.CPU, Tier.NVME, tuple(copies))
            self._migrator.migrate(
                plan, deadline_s=self._config.deadline_s, keep_source=True,
                on_done=lambda result: self._done.put((None, result)),
            )  # fmt: skip

    def _end_save(self, result: MigrationResult, now_s: float) -> None:
        for key in (*result.moved, *result.refused):
            self._lent.take_back(BlockKey(key))
        moved = [BlockKey(key) for key in result.moved]
        if moved:
            self._manager.saved(moved, now_s)
        for key in moved:
            if not self._books.is_on(key, Tier.NVME):
                self._remove_file(key)
                self._forget_digest(key)
        for key, reason in result.refused.items():
            self._manager.failed([BlockKey(key)], reason, now_s)
            self._forget_digest(BlockKey(key))
            if reason.startswith(("failed", "full")):
                self._paused_until_s = now_s + PAUSE_S
        # On a full device the store has lowered its bound: as if others had the rest, so that old files make way.
        num_lost = self._capacity - self._store.capacity_blocks(self._engine.block_bytes)
        if num_lost > self._manager.num_occupied(Tier.NVME):
            self._manager.occupied(Tier.NVME, num_lost, now_s)

    def _drop_files(self, keys: Sequence[BlockKey], now_s: float) -> None:
        for key in keys:
            self._remove_file(key)
        if keys:
            self._manager.dropped(Tier.NVME, keys, now_s)
            for key in keys:
                self._forget_digest(key)

    def _remove_file(self, key: BlockKey) -> None:
        try:
            self._store.remove(key)
        except (KeyError, TierError):
            self._counts["files_missing"] += 1

    # loading

    def admit(self, request: RequestMetadata) -> bool:
        """Not while blocks that the request begins with are being read, unless that takes too long."""
        self._catch_up()
        self._end_loads()
        request_id, now_s = request.request_id, time.monotonic()
        is_late = self._waits.is_late(request_id, now_s)
        if self._waits.is_waiting(request_id):
            if not is_late:
                return False
            self._counts["loads_late"] += 1
            self._loads_paused_until_s = now_s + PAUSE_S
        elif not is_late and self._wait_for_load(request_id, now_s):
            return False
        self._leave(request_id)
        return True

    def on_request_end(self, request_id: RequestId) -> None:
        self._catch_up()
        self._leave(request_id)

    def _wait_for_load(self, request_id: RequestId, now_s: float) -> bool:
        """Whether blocks are on their way now that the request had better wait for; others may have asked for them."""
        if not self._books.num_blocks(Tier.NVME):
            return False
        if now_s < self._loads_paused_until_s:
            self._counts["loads_paused"] += 1
            return False
        tokens, namespace = self._engine.request_tokens(request_id)
        keys = self._known_keys(tokens, namespace)
        num_before = self._books.num_resident(keys)
        if num_before == len(keys):
            return False
        load = self._waits.load_of(keys[num_before])
        if load is not None:
            self._waits.join(load, request_id, now_s)
            self._counts["loads_shared"] += 1
            return True
        if not self._waits.may_begin(request_id):
            return False
        wanted = self._worth_loading(request_id, keys, num_before, now_s)
        load = self._begin_load(wanted, tokens, namespace, num_before, now_s) if wanted else None
        if load is not None:
            self._waits.begin(load, request_id, now_s)
        return load is not None

    def _known_keys(self, tokens: np.ndarray, namespace: str) -> list[BlockKey]:
        """Of the first blocks of these tokens, as far as they are known. One token must be left to compute."""
        size = self._engine.block_size
        keys: list[BlockKey] = []
        for digest in token_digests(tokens[: (len(tokens) - 1) // size * size], namespace, size):
            key = self._key_of_digest.get(digest)
            if key is None:
                break
            keys.append(key)
        return keys

    def _worth_loading(
        self, request_id: RequestId, keys: list[BlockKey], num_before: int, now_s: float
    ) -> list[BlockKey]:
        """Blocks of files that follow the first `num_before`, which are nearer."""
        self._calibrate()
        self._look_at_host(self._engine.block_counts(), now_s)
        queued = self._migrator.queued_bytes(Tier.NVME, Tier.CPU)
        running = len(self._books.requests())
        fetch = self._manager.fetch(request_id, keys, num_before, now_s, running, queued)
        num_files = next((n for n, tier in enumerate(fetch.tiers) if tier is not Tier.NVME), len(fetch.tiers))
        return list(fetch.keys[:num_files])

    def _begin_load(
        self, wanted: list[BlockKey], tokens: np.ndarray, namespace: str, num_before: int, now_s: float
    ) -> Load | None:
        """None: there is no room on the host tier, nor can there be any."""
        self._manager.loading(wanted, now_s)  # so that what they continue is nobody's victim
        self._make_host_room(wanted, now_s)
        ids, buffers = self._engine.reserve_host(len(wanted))
        if len(ids) < len(wanted):
            self._counts["loads_without_room"] += len(wanted) - len(ids)
            self._manager.failed(wanted[len(ids) :], "no room on the host tier", now_s)
        keys = wanted[: len(ids)]
        if not keys:
            return None
        load = Load(keys, ids, tokens, namespace, num_before)
        for key, buffer in zip(keys, buffers, strict=True):
            self._lent.offer(key, buffer)
        load.future = self._migrator.migrate(
            MigrationPlan(Tier.NVME, Tier.CPU, tuple(keys)), deadline_s=self._config.deadline_s, keep_source=True,
            digests={key: self._digest_of[key] for key in keys}, on_done=lambda result: self._done.put((load, result)),
        )  # fmt: skip
        return load

    def _make_host_room(self, arriving: Sequence[BlockKey], now_s: float) -> None:
        """Others leave the host tier for blocks that the books count as on their way there."""
        short = -self._manager.num_free(Tier.CPU)
        if short <= 0:
            return
        room = self._manager.make_room(Tier.CPU, min(short, len(arriving)), arriving[::-1], now_s)
        if self._is_stale(room, Tier.CPU):
            self._counts["answers_withheld"] += 1
            return
        self._follow(room, now_s)

    def _leave(self, request_id: RequestId) -> None:
        load = self._waits.leave(request_id)
        if load is not None:
            self._give_up_load(load)

    def _give_up_load(self, load: Load) -> None:
        """Nobody waits for it. Its blocks of the host go back once nothing writes there any more."""
        self._waits.end(load)
        if load.result is not None:
            self._engine.free_host(load.block_ids)
            self._fail_load(load, load.keys, "nobody waits for it")
        elif load.future is not None:
            load.future.cancel()

    def _end_loads(self) -> None:
        loads, self._read = self._read, []
        for load in loads:
            if load.waiting:
                self._end_load(load)
                self._waits.end(load)

    def _end_load(self, load: Load) -> None:
        """What was read becomes part of the engine's prefix cache, as far as it continues what is there."""
        moved = set(load.result.moved if load.result else ())
        num_read = next((n for n, key in enumerate(load.keys) if key not in moved), len(load.keys))
        ids, rest = load.block_ids[:num_read], load.block_ids[num_read:]
        taken: tuple[int, ...] = ()
        if ids:
            end = (load.num_before + num_read) * self._engine.block_size
            taken = self._engine.adopt_host(ids, load.tokens[:end], load.namespace)
        if rest:
            self._engine.free_host(rest)
        key_of = dict(zip(load.block_ids, load.keys, strict=True))
        arrived = self._in_place([key_of[block] for block in taken])
        if arrived:
            self._manager.loaded(arrived, time.monotonic())
        for block in taken[: len(arrived)]:
            if self._books.fast_tier(key_of[block]) is Tier.CPU:
                self._name(block, key_of[block])
                self._told.add(key_of[block])
        self._fail_load(load, [key for key in load.keys if key not in arrived], "not read, or there already")

    def _in_place(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The first of these blocks, as far as each continues in the engine what it continues in the books.

        Where that has another name, or holds other tokens, the books come to know them when they are put right.
        """
        for place, key in enumerate(keys):
            parent = self._books.block(key).parent
            if parent is not None and parent not in self._told and parent not in keys[:place]:
                return list(keys[:place])
        return list(keys)

    def _fail_load(self, load: Load, keys: Sequence[BlockKey], reason: str) -> None:
        now_s = time.monotonic()
        if keys:
            self._manager.failed(keys, reason, now_s)
            self._counts["loads_failed"] += len(keys)
        for key in load.keys:
            # A file that failed was dropped by the store; the books follow.
            if self._books.is_on(key, Tier.NVME) and key not in self._store:
                self._manager.dropped(Tier.NVME, [key], now_s, evicted=False)
                self._forget_digest(key)

    # what has ended since the last call

    def _catch_up(self) -> None:
        super()._catch_up()
        if self._num_lost_told != self._engine.num_lost_notices:  # an id may stand for another block by now
            self._num_lost_told = self._engine.num_lost_notices
            self._told.clear()
        if self._store is None or self._found:
            self._come_open()
        now_s = time.monotonic()
        while True:
            try:
                load, result = self._done.get_nowait()
            except Empty:
                return
            if load is None:
                self._end_save(result, now_s)
                continue
            load.result = result
            for key in load.keys:
                self._lent.take_back(key)
            if load.waiting:
                self._read.append(load)
            else:
                self._give_up_load(load)

    def _forget_digest(self, key: BlockKey) -> None:
        if key not in self._books and not self._manager.is_arriving(key):
            digest = self._digest_of.pop(key, None)
            if digest is not None and self._key_of_digest.get(digest) == key:
                del self._key_of_digest[digest]

    def _gone(self, tier: Tier, keys: Sequence[BlockKey], now_s: float) -> None:
        super()._gone(tier, keys, now_s)
        self._told.difference_update(keys)
        for key in keys:
            self._forget_digest(key)

    def _forget_id(self, block_id: int, *, evicted: bool = False) -> None:
        key = self._key_of.get(BlockId(block_id))
        super()._forget_id(block_id, evicted=evicted)
        if key is not None:
            self._told.discard(key)
            self._forget_digest(key)
