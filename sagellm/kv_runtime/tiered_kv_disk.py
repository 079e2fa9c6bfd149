"""`TieredKV` with a tier of files below the host tier: blocks that leave the host are written, and read again for a request
that waits and begins with them."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sagellm.core.errors import PluginError, TierError
from sagellm.core.hooks import EngineHandle, PrefixUpdate, RequestId, RequestMetadata, Tier
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.base import StoredBlock
from sagellm.kv_runtime.costs import Copies
from sagellm.kv_runtime.digests import Digests, token_digests
from sagellm.kv_runtime.disk_store import DiskStore
from sagellm.kv_runtime.disk_store_format import record_bytes
from sagellm.kv_runtime.file_link import FileLink
from sagellm.kv_runtime.loader import Loader
from sagellm.kv_runtime.opening import Opening
from sagellm.kv_runtime.saver import Saver
from sagellm.kv_runtime.tier_spec import TierSpec
from sagellm.kv_runtime.tiered_kv import TieredKV

__all__ = ["TieredKVWithDisk", "capacity_blocks"]

CLOSE_S = 1.0  # how long moves that are under way may take to end
SAVE_REST_S = 3.0  # how long `close` goes on saving what lies on the host
GRACE_S = 0.25  # how long after the deadline of a load the answer that it is late may take
ADOPTED_AT_ONCE = 1000  # blocks of an earlier run that a hook tells to the books
MAX_BLOCKS = 1 << 24  # of a policy's books in memory; 64 TiB of blocks of 4 MiB
OPEN_WAIT_S = 0.2  # for the folder, before the engine goes on without it for a while


def capacity_blocks(gib: float, block_bytes: int) -> int:
    """How many blocks of this size the tier has room for, at most `MAX_BLOCKS`."""
    return min(int(gib * 2**30) // record_bytes(block_bytes), MAX_BLOCKS)


class TieredKVWithDisk(TieredKV):
    """Saves and loads in the background (`Saver`, `Loader`); the engine waits for neither.

    A block that leaves the host tier is written if the migration policy finds that worth it. A request that begins with blocks
    of files is not admitted while they are read, up to the deadline. A device that hangs or fails does not keep every request
    waiting: for a while nothing is asked of it.

    A block is named by 64 bits, which people could collide, so a file also has the digest of all its tokens. A key stands for
    the tokens of one digest as long as it is on any tier or on its way to one; a block with the same key and other tokens is
    refused.
    """

    name = "tiered KV with disk"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self._config.disk is None:
            raise PluginError("a KV plug-in with a disk tier needs `disk`, its folder; or use TieredKV.")
        self._opening: Opening | None = None
        self._link: FileLink | None = None  # until the folder is open; so are the next two
        self._saver: Saver | None = None
        self._loader: Loader | None = None
        self._found: list[StoredBlock] = []  # blocks of an earlier run that the books do not know yet
        self._num_lost_told = 0
        self._is_closed = False

    def _policies(self) -> list[tuple[str, dict[str, Any]]]:
        return [*super()._policies(), (self._config.disk_policy, self._config.disk_options)]

    def attach(self, engine: EngineHandle) -> None:
        """Raises PluginError or TierError: no host tier, bytes of unknown meaning, a folder that cannot be used."""
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
        self._digests = Digests(self._manager)
        self._opening = Opening(lambda: DiskStore(config.disk, capacity_bytes, layout=layout))
        self._come_open(OPEN_WAIT_S)

    def _tiers(self) -> list[TierSpec]:
        config = self._config
        return [*super()._tiers(), TierSpec(Tier.NVME, self._capacity, config.disk_policy, config.disk_options)]

    def _come_open(self, wait_s: float = 0.0) -> None:
        """Begin to use the store once it is open. Blocks of an earlier run join the books bit by bit."""
        if self._link is None:
            store = self._opening.result(wait_s)
            if store is None:
                return
            deadline_s = self._config.deadline_s
            self._link = FileLink(store, self._engine, deadline_s)
            self._saver = Saver(self._blocks, self._digests, self._link, self._capacity)
            self._loader = Loader(
                self._blocks, self._digests, self._link, deadline_s + GRACE_S,
                before_fetch=self._before_fetch, make_room=self._make_host_room,
            )  # fmt: skip
            self._found = store.blocks()
        if self._found:
            some, self._found = self._found[:ADOPTED_AT_ONCE], self._found[ADOPTED_AT_ONCE:]
            self._adopt(some, time.monotonic())

    def _adopt(self, found: Sequence[StoredBlock], now_s: float) -> None:
        """Blocks of an earlier run come into the books, or their files go."""
        own = [each for each in found if each.digest and not self._is_of_others(each.block.key, each.digest)]
        self._manager.adopted([each.block._replace(time_s=now_s) for each in own], Tier.NVME, now_s)
        adopted = {each.block.key: each.digest for each in own if self._books.is_on(each.block.key, Tier.NVME)}
        for each in found:
            if each.block.key in adopted:
                self._digests.bind(each.block.key, each.digest)
            else:
                self._saver.remove(each.block.key)  # of unknown tokens, or another block's by now

    def close(self) -> None:
        """Save the blocks of the host tier and finish those on their way to files, as far as a few seconds allow.

        Raises TierError: a move hangs in a file; the folder is free for others all the same.
        """
        try:
            if self._link is not None and not self._is_closed:
                self._is_closed = True
                with suppress(PluginError):  # after a fault the engine answers nothing any more
                    until_s = time.monotonic() + SAVE_REST_S
                    self._catch_up()
                    self._saver.save_rest(until_s, self._catch_up)
                self._link.migrator.close(CLOSE_S)
        finally:
            if self._opening is not None:
                self._opening.abandon()

    def report(self) -> dict[str, Any]:
        found = super().report()
        if self._link is None:
            return found
        # The store has lowered its bound if the device was full.
        room = self._link.store.capacity_blocks(self._engine.block_bytes)
        capacity = found["capacity_blocks"] | {Tier.NVME.value: min(self._capacity, room)}
        return {**found, "capacity_blocks": capacity, **self._link.report()}

    def _copies(self) -> Copies:
        return self._link.samples() if self._link is not None else {}

    # tokens of blocks

    def _digests_of(self, update: PrefixUpdate, parent: BlockKey | None) -> Sequence[bytes]:
        before = self._digests.told(parent) if update.first_token else b""
        if before is None:
            # Its beginning came before the plug-in listened; these are never saved.
            return super()._digests_of(update, parent)
        return token_digests(update.token_ids, update.namespace, self._engine.block_size, before)

    def _is_of_others(self, key: BlockKey, digest: bytes) -> bool:
        is_other = self._digests.is_other(key, digest)
        self._counts["collisions"] += is_other
        return is_other

    def _set_digest(self, key: BlockKey, digest: bytes) -> None:
        self._digests.untell([key])
        if digest and key in self._books and key not in self._blocks.foreign:
            self._digests.bind(key, digest)
            self._digests.tell(key)

    def _forget_tokens(self, keys: Sequence[BlockKey]) -> None:
        self._digests.untell(keys)
        self._digests.forget(keys)

    # saving

    def _save(self, keys: Sequence[BlockKey], now_s: float) -> None:
        if self._saver is None:
            self._counts["saves_paused"] += len(keys)
        else:
            self._saver.save(keys, now_s)

    def _drop_files(self, keys: Sequence[BlockKey], now_s: float) -> None:
        if self._saver is not None:
            self._saver.drop(keys, now_s)

    # loading

    def admit(self, request: RequestMetadata) -> bool:
        """Not while blocks that the request begins with are being read, unless that takes too long."""
        self._catch_up()
        return self._loader is None or self._loader.admit(request.request_id)

    def on_request_end(self, request_id: RequestId) -> None:
        self._catch_up()
        if self._loader is not None:
            self._loader.leave(request_id)

    def _before_fetch(self, now_s: float) -> None:
        self._calibrate()
        self._look_at_host(self._engine.block_counts(), now_s)

    def _make_host_room(self, arriving: Sequence[BlockKey], now_s: float) -> None:
        """Others leave the host tier for blocks that the books count as on their way there."""
        short = -self._manager.num_free(Tier.CPU)
        if short <= 0:
            return
        room = self._manager.make_room(Tier.CPU, min(short, len(arriving)), arriving[::-1], now_s)
        if self._agreement.is_stale(room, Tier.CPU):
            self._counts["answers_withheld"] += 1
            return
        self._follow(room, now_s)

    def _catch_up(self) -> None:
        super()._catch_up()
        if self._num_lost_told != self._engine.num_lost_notices:  # an id may stand for another block by now
            self._num_lost_told = self._engine.num_lost_notices
            self._digests.untell_all()
        if self._link is None or self._found:
            self._come_open()
        if self._link is not None:
            self._link.tell_ended(time.monotonic())
