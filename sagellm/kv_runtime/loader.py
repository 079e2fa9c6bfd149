"""Reads blocks of files for requests that wait and begin with them, and makes them part of the engine's prefix cache."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from sagellm.core.hooks import MigrationResult, RequestId, Tier
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.digests import Digests, token_digests
from sagellm.kv_runtime.engine_blocks import EngineBlocks
from sagellm.kv_runtime.file_link import PAUSE_S, FileLink
from sagellm.kv_runtime.loads import Load, Waits

__all__ = ["Loader"]


class Loader:
    """A request that begins with blocks of files waits while they are read. Others leave the host tier for them; the engine's
    own lookup then finds them. Requests that begin with the same blocks wait for the same load. After one that was late
    nothing is loaded for `PAUSE_S`.

    A load asks for the blocks whose digests are those of the request's own tokens.

    Args:
        wait_s: how long a request waits in all.
        before_fetch: called with the time before it is asked what to load: what is measured and counted goes to the books.
        make_room: others leave the host tier, as far as they can, for blocks that the books count as on their way there.
    """

    def __init__(
        self, blocks: EngineBlocks, digests: Digests, link: FileLink, wait_s: float, *,
        before_fetch: Callable[[float], None], make_room: Callable[[Sequence[BlockKey], float], None],
    ) -> None:  # fmt: skip
        self._blocks = blocks
        self._engine, self._manager, self._books = blocks.engine, blocks.manager, blocks.books
        self._counts = blocks.counts
        self._digests = digests
        self._link = link
        self._before_fetch = before_fetch
        self._make_room = make_room
        self._waits = Waits(wait_s)
        self._read: list[Load] = []  # that were read, and somebody waits for
        self._paused_until_s = 0.0

    def admit(self, request_id: RequestId) -> bool:
        """Not while blocks that the request begins with are being read, unless that takes too long."""
        self._end_all()
        now_s = time.monotonic()
        is_late = self._waits.is_late(request_id, now_s)
        if self._waits.is_waiting(request_id):
            if not is_late:
                return False
            self._counts["loads_late"] += 1
            self._paused_until_s = now_s + PAUSE_S
        elif not is_late and self._wait_for_load(request_id, now_s):
            return False
        self.leave(request_id)
        return True

    def leave(self, request_id: RequestId) -> None:
        """The request does not wait any more."""
        load = self._waits.leave(request_id)
        if load is not None:
            self._give_up(load)

    def _wait_for_load(self, request_id: RequestId, now_s: float) -> bool:
        """Whether blocks are on their way now that the request had better wait for; others may have asked for them."""
        if not self._books.num_blocks(Tier.NVME):
            return False
        if now_s < self._paused_until_s:
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
        load = self._begin(wanted, tokens, namespace, num_before, now_s) if wanted else None
        if load is not None:
            self._waits.begin(load, request_id, now_s)
        return load is not None

    def _known_keys(self, tokens: np.ndarray, namespace: str) -> list[BlockKey]:
        """Digests of the first blocks of these tokens, as far as they are known. One token must be left to compute."""
        size = self._engine.block_size
        keys: list[BlockKey] = []
        for digest in token_digests(tokens[: (len(tokens) - 1) // size * size], namespace, size):
            key = self._digests.key_of(digest)
            if key is None:
                break
            keys.append(key)
        return keys

    def _worth_loading(
        self, request_id: RequestId, keys: list[BlockKey], num_before: int, now_s: float
    ) -> list[BlockKey]:
        """Blocks of files that follow the first `num_before`, which are nearer."""
        self._before_fetch(now_s)
        queued = self._link.migrator.queued_bytes(Tier.NVME, Tier.CPU)
        running = len(self._books.requests())
        fetch = self._manager.fetch(request_id, keys, num_before, now_s, running, queued)
        num_files = next((n for n, tier in enumerate(fetch.tiers) if tier is not Tier.NVME), len(fetch.tiers))
        return list(fetch.keys[:num_files])

    def _begin(
        self, wanted: list[BlockKey], tokens: np.ndarray, namespace: str, num_before: int, now_s: float
    ) -> Load | None:
        """None: there is no room on the host tier, nor can there be any."""
        self._manager.loading(wanted, now_s)  # so that the blocks they continue are not evicted
        self._make_room(wanted, now_s)
        ids, buffers = self._engine.reserve_host(len(wanted))
        if len(ids) < len(wanted):
            self._counts["loads_without_room"] += len(wanted) - len(ids)
            self._manager.failed(wanted[len(ids) :], "no room on the host tier", now_s)
        keys = wanted[: len(ids)]
        if not keys:
            return None
        load = Load(keys, ids, tokens, namespace, num_before)
        for key, buffer in zip(keys, buffers, strict=True):
            self._link.lent.offer(key, buffer)
        digests = {key: self._digests.of(key) for key in keys}
        load.future = self._link.copy(Tier.NVME, Tier.CPU, keys, partial(self._was_read, load), digests)
        return load

    def _was_read(self, load: Load, result: MigrationResult, now_s: float) -> None:
        load.result = result
        if load.waiting:
            self._read.append(load)
        else:
            self._give_up(load)

    def _give_up(self, load: Load) -> None:
        """Without waiting. Its blocks of the host go back once nothing writes there any more."""
        self._waits.end(load)
        if load.result is not None:
            self._engine.free_host(load.block_ids)
            self._fail(load, load.keys, "no request waits for it")
        elif load.future is not None:
            load.future.cancel()

    def _end_all(self) -> None:
        loads, self._read = self._read, []
        for load in loads:
            if load.waiting:
                self._end(load)
                self._waits.end(load)

    def _end(self, load: Load) -> None:
        """Loaded blocks join the engine's prefix cache, as far as they continue it."""
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
                self._blocks.name(block, key_of[block])
                self._digests.tell(key_of[block])
        self._fail(load, [key for key in load.keys if key not in arrived], "not read, or there already")

    def _in_place(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The first of these blocks, as far as each continues in the engine what it continues in the books.

        Where that has another name, or holds other tokens, the books come to know them when they are put right.
        """
        for place, key in enumerate(keys):
            parent = self._books.block(key).parent
            if parent is not None and not self._digests.is_told(parent) and parent not in keys[:place]:
                return list(keys[:place])
        return list(keys)

    def _fail(self, load: Load, keys: Sequence[BlockKey], reason: str) -> None:
        now_s = time.monotonic()
        if keys:
            self._manager.failed(keys, reason, now_s)
            self._counts["loads_failed"] += len(keys)
        for key in load.keys:
            # A file that failed was dropped by the store; the books follow.
            if self._books.is_on(key, Tier.NVME) and key not in self._link.store:
                self._manager.dropped(Tier.NVME, [key], now_s, evicted=False)
                self._digests.forget([key])
