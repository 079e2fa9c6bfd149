"""Copies between an engine's host tier and files, made in the background; what has ended is told when the plug-in asks."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from sagellm.core.hooks import EngineHandle, MigrationPlan, MigrationResult, Tier
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.costs import Copies
from sagellm.kv_runtime.disk_store import DiskStore
from sagellm.kv_runtime.lent_store import LentStore
from sagellm.kv_runtime.migrator import KVMigrator

__all__ = ["PAUSE_S", "FileLink"]

PAUSE_S = 10.0  # nothing is saved for so long after a write failed, and nothing loaded after a load was late

Ended = Callable[[MigrationResult, float], None]  # (result, now_s)


class FileLink:
    """A store of files, memory that the engine lends for copies, and who makes them. `deadline_s`: of each copy."""

    def __init__(self, store: DiskStore, engine: EngineHandle, deadline_s: float) -> None:
        self.store = store
        self.lent = LentStore(Tier.CPU, engine.block_counts().host_total * engine.block_bytes)
        self.migrator = KVMigrator([self.lent, store])
        self._deadline_s = deadline_s
        self._over: SimpleQueue[tuple[Sequence[BlockKey], Ended, MigrationResult]] = SimpleQueue()

    def copy(
        self, src: Tier, dst: Tier, keys: Sequence[BlockKey], ended: Ended, digests: Mapping[BlockKey, bytes] | None = None
    ) -> "Future[MigrationResult]":  # fmt: skip
        """Begin to copy blocks that were lent, or files into room that was offered; the source stays.

        `digests`: what the files must have. `ended` is called by `tell_ended`, once nothing touches the memory any more.
        """
        return self.migrator.migrate(
            MigrationPlan(src, dst, tuple(keys)), deadline_s=self._deadline_s, keep_source=True, digests=digests or {},
            on_done=lambda result: self._over.put((keys, ended, result)),
        )  # fmt: skip

    def tell_ended(self, now_s: float) -> None:
        """Take the memory of all copies that have ended back, and tell who began them."""
        while True:
            try:
                keys, ended, result = self._over.get_nowait()
            except Empty:
                return
            for key in keys:
                self.lent.take_back(key)
            ended(result, now_s)

    def samples(self) -> Copies:
        """By direction, (bytes, seconds) of copies."""
        pairs = [(Tier.CPU, Tier.NVME), (Tier.NVME, Tier.CPU)]
        return {f"{src.value}->{dst.value}": self.migrator.samples(src, dst) for src, dst in pairs}

    def report(self) -> dict[str, Any]:
        """Copies by direction and outcome, and the store's own counters."""
        moves: dict[str, dict[str, int]] = {}
        for src, dst, outcome, num_blocks, _ in self.migrator.counts():
            moves.setdefault(f"{src.value}_{dst.value}", {})[outcome] = num_blocks
        return {"moves": moves, "disk": self.store.counters()}
