"""Opens a store beside the engine: a folder with many files takes longer than a hook may."""

import threading
from collections.abc import Callable
from typing import Any


class Opening:
    """Runs `open_store` on a thread of its own. One owner, who calls `result` until there is one, or `abandon`."""

    def __init__(self, open_store: Callable[[], Any]) -> None:
        self._open = open_store
        self._lock = threading.Lock()
        self._store: Any = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="kv-store-opening", daemon=True)
        self._thread.start()

    def result(self, wait_s: float = 0.0) -> Any:
        """The store; None while it is being opened. Raises what `open_store` has raised."""
        self._thread.join(wait_s)
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._store

    def abandon(self) -> None:
        """Give up the store: it is closed as soon as it is open."""
        with self._lock:
            self._is_abandoned = True
            if self._store is not None:
                self._store.close()

    def _run(self) -> None:
        try:
            store = self._open()
        except BaseException as error:  # for the reader of the result
            with self._lock:
                self._error = error
            return
        with self._lock:
            self._store = store
            if self._is_abandoned:
                store.close()
