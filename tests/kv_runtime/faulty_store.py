"""A store that fails, hangs or damages what goes through it, when it is told to."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from sagellm.core.errors import TierError

LIMIT_S = 30.0  # a test that would hang fails instead


class FaultyStore:
    """Another store, with faults. `fail[name]` is raised by the call of that name; `hang(name)` makes it wait.

    `events`: every call of prepare, read, commit, abort and remove, as (name, key).
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.fail: dict[str, Exception] = {}
        self.corrupt: set[int] = set()
        self.events: list[tuple[str, int]] = []
        self._gates: dict[str, tuple[threading.Event, threading.Event]] = {}

    def hang(self, name: str) -> tuple[threading.Event, threading.Event]:
        """(set when a call of this name has come, to be set for it to go on)."""
        self._gates[name] = threading.Event(), threading.Event()
        return self._gates[name]

    def _call(self, name: str, key: int, call: Callable[[], Any]) -> Any:
        self.events.append((name, key))
        if name in self._gates:
            arrived, go_on = self._gates[name]
            arrived.set()
            assert go_on.wait(LIMIT_S), "nobody let this call go on"
        if name in self.fail:
            raise self.fail[name]
        return call()

    def prepare(self, block: Any, digest: bytes = b"") -> np.ndarray:
        return self._call("prepare", block.key, lambda: self.store.prepare(block, digest))

    def read(self, key: int, into: Any = None, digest: bytes = b"") -> np.ndarray:
        if key in self.corrupt:
            self.store.remove(key)
            raise TierError(f"block {key} is corrupt and was dropped; compute it again.")
        return self._call("read", key, lambda: self.store.read(key, into, digest))

    def commit(self, key: int) -> None:
        return self._call("commit", key, lambda: self.store.commit(key))

    def abort(self, key: int) -> None:
        return self._call("abort", key, lambda: self.store.abort(key))

    def remove(self, key: int) -> None:
        return self._call("remove", key, lambda: self.store.remove(key))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def __contains__(self, key: int) -> bool:
        return key in self.store

    def __len__(self) -> int:
        return len(self.store)
