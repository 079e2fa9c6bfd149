"""One migration on its way: what it moves, what has become of each block, and when it is over."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from sagellm.core.hooks import MigrationPlan, MigrationResult
from sagellm.kv_policy.base import BlockKey
from sagellm.kv_runtime.base import StoredBlock, TierStore

__all__ = ["MigrationJob"]


class MigrationJob:
    """Its result is settled once, by the first of these: the worker, the deadline, a cancellation, `close`.

    The worker may still be inside a store then, perhaps for long. Its later results are undone. `on_done` is
    called when it has come out, since only then the memory of the blocks is not touched any more.

    Attributes:
        future: pending until the result is settled, so that it can be cancelled all the time.
        deadline: on the clock of `time.monotonic`; None for none.
        samples: (bytes, seconds) of each few blocks that were moved together.
        is_started: a worker has it, or had it.
    """

    def __init__(
        self,
        plan: MigrationPlan,
        source: TierStore,
        target: TierStore,
        *,
        deadline: float | None,
        keep_source: bool,
        on_done: Callable[[MigrationResult], None] | None,
    ) -> None:
        self.plan = plan
        self.source = source
        self.target = target
        self.deadline = deadline
        self.keep_source = keep_source
        self.future: Future[MigrationResult] = Future()
        self.blocks: dict[BlockKey, StoredBlock] = {}  # to be moved, in the order of the plan
        self.num_bytes = 0  # of these
        self.samples: list[tuple[int, float]] = []
        self._on_done = on_done
        self._lock = threading.Lock()
        self._moved: list[int] = []
        self._refused: dict[int, str] = {}
        self._result: MigrationResult | None = None
        self._is_announced = False
        self.is_started = False

    def start(self) -> bool:
        """Whether a worker may begin; False when it was settled while it waited."""
        with self._lock:
            self.is_started = self._result is None
            return self.is_started

    def is_over(self) -> bool:
        if self._result is None and self.deadline is not None and time.monotonic() >= self.deadline:
            self.settle("deadline")
        return self._result is not None

    def moved(self, key: BlockKey) -> bool:
        """The block is committed. False: too late, it has to be undone."""
        with self._lock:
            if self._result is None:
                self._moved.append(key)
            return self._result is None

    def refuse(self, key: int, reason: str) -> None:
        with self._lock:
            if self._result is None:
                self._refused[key] = reason

    def settle(self, reason: str) -> bool:
        """Fix the result; blocks of which nothing is known yet are refused for this reason. False: it was fixed before."""
        with self._lock:
            if self._result is not None:
                return False
            done = {*self._moved, *self._refused}
            self._refused.update({key: reason for key in self.plan.block_ids if key not in done})
            self._result = MigrationResult(tuple(self._moved), dict(self._refused))
            return True

    def announce(self) -> None:
        """End the future, once."""
        with self._lock:
            is_first, self._is_announced = not self._is_announced, True
        if is_first and self.future.set_running_or_notify_cancel():
            self.future.set_result(self.result())

    def result(self) -> MigrationResult:
        """The settled result."""
        assert self._result is not None, "not settled yet"
        return self._result

    def tell(self) -> None:
        """Call `on_done`, which is somebody else's code."""
        if self._on_done is not None:
            try:
                self._on_done(self.result())
            except Exception:
                logging.getLogger(__name__).exception("on_done of a migration raised; the migration itself is done")
