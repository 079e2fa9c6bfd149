"""Ours and libCacheSim, each with what it needs at hand: requests in its own form, loops in its own language."""

import importlib.metadata
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

POLICIES = ("fifo", "lru", "lfu", "arc", "sieve", "s3fifo", "twoq", "gdsf")


class Contestant(Protocol):
    """One contestant and its requests.

    Attributes:
        version: of the package.
        note: how the figures come about.
    """

    version: str
    note: str

    def load(self, keys: NDArray[np.int64], folder: Path) -> None:
        """Take the requests over. `folder` may hold them in another form."""
        ...

    def hits(self, policy: str, capacity: int) -> NDArray[np.bool_] | None:
        """Which requests hit. None if this contestant has nothing at this capacity."""
        ...

    def batch(self, policy: str, capacity: int) -> Any:
        """A new cache and all requests in one call; what it returns is what it counted."""
        ...

    def singly(self, policy: str, capacity: int) -> None:
        """A new cache and a call a request, from Python."""
        ...


class SageContestant:
    note = "`replay_objects` of an int64 array; one by one `ObjectCache.access` of Python's integers"

    def __init__(self) -> None:
        from sagellm import _core

        self._core, self.version = _core, importlib.metadata.version("sagellm")

    def load(self, keys: NDArray[np.int64], folder: Path) -> None:
        self._keys, self._numbers = keys, keys.tolist()

    def hits(self, policy: str, capacity: int) -> NDArray[np.bool_]:
        return self._core.replay_objects(policy, capacity, self._keys)

    def batch(self, policy: str, capacity: int) -> None:
        self._core.replay_objects(policy, capacity, self._keys)

    def singly(self, policy: str, capacity: int) -> None:
        access = self._core.ObjectCache(policy, capacity).access
        for number in self._numbers:
            access(number)


class LibCacheSimContestant:
    """Its S3-FIFO has the options of its authors' paper, as ours has by default."""

    note = (
        "`process_trace` of a file in its format oracleGeneral, which is mapped into memory; one by one `get` of one request "
        "whose id is set each time"
    )
    NAMES: ClassVar = dict(
        fifo="FIFO", lru="LRU", lfu="LFU", arc="ARC", sieve="Sieve", s3fifo="S3FIFO", twoq="TwoQ", gdsf="GDSF"
    )
    # Below these capacities it is another policy. S3-FIFO: its small queue has less than 2 places, and it admits nothing or
    # ends the process. 2Q: its first queue has no place. GDSF: it keeps an object that was found again and admits no new one.
    LEAST: ClassVar = {"s3fifo": 20, "twoq": 4, "gdsf": 3}

    def __init__(self) -> None:
        import libcachesim

        self._library, self.version = libcachesim, importlib.metadata.version("libcachesim")

    def load(self, keys: NDArray[np.int64], folder: Path) -> None:
        # Its format: time, id, size, and the next request of the object, which none of these policies looks at.
        records = np.zeros(len(keys), [("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
        records["id"], records["size"], records["next"] = keys, 1, -1
        path = folder / "requests.oracleGeneral"
        records.tofile(path)
        self._reader = self._library.TraceReader(str(path), self._library.TraceType.ORACLE_GENERAL_TRACE)
        self._numbers = keys.tolist()

    def hits(self, policy: str, capacity: int) -> NDArray[np.bool_] | None:
        if capacity < self.LEAST.get(policy, 1):
            return None
        get, request = self._get(policy, capacity)
        hits = np.zeros(len(self._numbers), bool)
        for place, number in enumerate(self._numbers):
            request.obj_id = number
            hits[place] = get(request)
        return hits

    def batch(self, policy: str, capacity: int) -> None:
        self._reader.reset()
        self._cache(policy, capacity).process_trace(self._reader)

    def singly(self, policy: str, capacity: int) -> None:
        get, request = self._get(policy, capacity)
        for number in self._numbers:
            request.obj_id = number
            get(request)

    def _cache(self, policy: str, capacity: int) -> Any:
        return getattr(self._library, self.NAMES[policy])(capacity, hashpower=18)

    def _get(self, policy: str, capacity: int) -> tuple[Any, Any]:
        request = self._library.Request()
        request.obj_size = 1
        return self._cache(policy, capacity).get, request


CONTESTANTS = {"sagellm": SageContestant, "libCacheSim": LibCacheSimContestant}
