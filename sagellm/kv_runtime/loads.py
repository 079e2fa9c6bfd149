"""Which requests wait for which blocks that are being read from files, and until when."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from sagellm.core.hooks import MigrationResult, RequestId
from sagellm.kv_policy.base import BlockKey

__all__ = ["Load", "Waits"]


@dataclass(slots=True, eq=False)
class Load:
    """Blocks on their way from files to reserved blocks of the host, for the requests that begin with them.

    `tokens`: of the request that began it; `num_before`: blocks of its sequence before these. `result`: once nothing touches
    the memory any more.
    """

    keys: list[BlockKey]
    block_ids: list[int]
    tokens: np.ndarray
    namespace: str
    num_before: int
    waiting: set[RequestId] = field(default_factory=set)
    future: "Future[MigrationResult] | None" = None
    result: MigrationResult | None = None


@dataclass(slots=True)
class _Wait:
    until_s: float
    load: Load | None = None
    has_begun: bool = False


class Waits:
    """One request waits for one load at a time, `wait_s` in all, and begins at most one of its own."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._waits: dict[RequestId, _Wait] = {}
        self._load_of: dict[BlockKey, Load] = {}

    def load_of(self, key: BlockKey) -> Load | None:
        """The load that brings this block."""
        return self._load_of.get(key)

    def is_waiting(self, request_id: RequestId) -> bool:
        wait = self._waits.get(request_id)
        return wait is not None and wait.load is not None

    def is_late(self, request_id: RequestId, now_s: float) -> bool:
        """Whether the request has waited for as long as it may."""
        wait = self._waits.get(request_id)
        return wait is not None and now_s >= wait.until_s

    def may_begin(self, request_id: RequestId) -> bool:
        wait = self._waits.get(request_id)
        return wait is None or not wait.has_begun

    def begin(self, load: Load, request_id: RequestId, now_s: float) -> None:
        """The request waits for a load of its own."""
        self._load_of.update(dict.fromkeys(load.keys, load))
        self.join(load, request_id, now_s)
        self._waits[request_id].has_begun = True

    def join(self, load: Load, request_id: RequestId, now_s: float) -> None:
        wait = self._waits.setdefault(request_id, _Wait(now_s + self._wait_s))
        wait.load = load
        load.waiting.add(request_id)

    def end(self, load: Load) -> None:
        """The load has no waiting request any more. How long those who did have waited is kept until they `leave`."""
        for key in load.keys:
            self._load_of.pop(key, None)
        for request_id in load.waiting:
            self._waits[request_id].load = None
        load.waiting.clear()

    def leave(self, request_id: RequestId) -> Load | None:
        """The request waits for nothing, and is forgotten. Return a load without a waiting request."""
        wait = self._waits.pop(request_id, None)
        if wait is None or wait.load is None:
            return None
        wait.load.waiting.discard(request_id)
        return None if wait.load.waiting else wait.load
