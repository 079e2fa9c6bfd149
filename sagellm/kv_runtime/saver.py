"""Writes blocks that leave the host tier to files, and removes files that make way."""

import time
from collections.abc import Callable, Sequence

from sagellm.core.errors import PluginError, TierError
from sagellm.core.hooks import MigrationResult, Tier
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.digests import Digests
from sagellm.kv_runtime.engine_blocks import EngineBlocks
from sagellm.kv_runtime.file_link import PAUSE_S, FileLink

__all__ = ["Saver"]

SAVED_AT_ONCE = 16


class Saver:
    """A block is copied at once and written later. Blocks that cannot be copied at that moment, or written in time, are
    lost, and computed again when needed. After a failed write nothing is saved for `PAUSE_S`.

    Only blocks with known tokens are saved. `capacity`: of the tier, in blocks.
    """

    def __init__(self, blocks: EngineBlocks, digests: Digests, link: FileLink, capacity: int) -> None:
        self._blocks = blocks
        self._engine, self._manager, self._books = blocks.engine, blocks.manager, blocks.books
        self._counts = blocks.counts
        self._digests = digests
        self._link = link
        self._capacity = capacity
        self._paused_until_s = 0.0

    def save(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """Begin to write blocks of the host tier; they may leave it when this returns."""
        if now_s < self._paused_until_s:
            self._counts["saves_paused"] += len(keys)
            return
        copied = []
        for key in keys:
            digest = self._digests.told(key)
            if digest is None or key in self._link.store:
                self._counts["saves_without_digest"] += digest is None
                continue
            try:
                content = self._engine.host_bytes([self._blocks.id_of[key]])[0]
                self._link.lent.lend(self._books.block(key), content, digest)
                copied.append(key)
            except (PluginError, TierError):
                self._counts["saves_not_copied"] += 1
        if copied:
            self._manager.saving(copied, now_s)
            self._link.copy(Tier.CPU, Tier.NVME, copied, self._end)

    def save_rest(self, until_s: float, catch_up: Callable[[], None]) -> None:
        """Save what lies on the host tier and has no file, and wait until it is written, or `time.monotonic` says `until_s`.

        Parents first, since a file is of no use without those of what it continues; most recently used sequences first.
        `catch_up`: tells the books what has ended.
        """
        books, is_told = self._books, self._digests.is_told
        keys = [key for key in books.recency(Tier.CPU) if is_told(key) and not books.is_on(key, Tier.NVME)]
        keys = keys[-self._capacity :]
        keys.sort(key=lambda key: books.block(key).depth)
        for first in range(0, len(keys), SAVED_AT_ONCE):
            some, now_s = keys[first : first + SAVED_AT_ONCE], time.monotonic()
            short = len(some) - self._manager.num_free(Tier.NVME)
            if short > 0:
                room = self._manager.make_room(Tier.NVME, short, some, now_s)
                self.drop([key for tier, key, _ in room.drop if tier is Tier.NVME], now_s)
            self.save(some[: max(self._manager.num_free(Tier.NVME), 0)], now_s)
            self._drain(until_s, catch_up)
            if time.monotonic() >= until_s:
                return
        self._drain(until_s, catch_up)

    def _drain(self, until_s: float, catch_up: Callable[[], None]) -> None:
        """Until no save is on its way."""
        while self._link.migrator.queued_bytes(Tier.CPU, Tier.NVME) and time.monotonic() < until_s:
            time.sleep(0.001)
        catch_up()

    def _end(self, result: MigrationResult, now_s: float) -> None:
        moved = [BlockKey(key) for key in result.moved]
        if moved:
            self._manager.saved(moved, now_s)
        for key in moved:
            if not self._books.is_on(key, Tier.NVME):
                self.remove(key)
                self._digests.forget([key])
        for key, reason in result.refused.items():
            self._manager.failed([BlockKey(key)], reason, now_s)
            self._digests.forget([BlockKey(key)])
            if reason.startswith(("failed", "full")):
                self._paused_until_s = now_s + PAUSE_S
        # On a full device the store has lowered its bound: as if others had the rest, so that old files make way.
        num_lost = self._capacity - self._link.store.capacity_blocks(self._engine.block_bytes)
        if num_lost > self._manager.num_occupied(Tier.NVME):
            self._manager.occupied(Tier.NVME, num_lost, now_s)

    def drop(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """Remove these files, in the books too."""
        for key in keys:
            self.remove(key)
        if keys:
            self._manager.dropped(Tier.NVME, keys, now_s)
            self._digests.forget(keys)

    def remove(self, key: BlockKey) -> None:
        """Remove a file that the books do not know. One that is not there is counted."""
        try:
            self._link.store.remove(key)
        except (KeyError, TierError):
            self._counts["files_missing"] += 1
