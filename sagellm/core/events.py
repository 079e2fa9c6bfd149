"""The event log: one JSON object a line, one line a decision, with its reason.

Every line has `t_ns` (time.monotonic_ns), `n` (a counter without gaps in one process), `pid` and `event`. This
package's README lists the other fields of an engine's lines.
"""

import atexit
import itertools
import json
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sagellm.core.errors import ConfigError

logger = logging.getLogger("sagellm")

FLUSH_INTERVAL_S = 0.2
FORMAT = 2  # of the lines; rises when a reader must change
HEAD = ("t_ns", "n", "pid", "event")


class Recorder(Protocol):
    enabled: bool

    def write(self, event: str, **fields: Any) -> None: ...

    def close(self) -> None: ...


class NullRecorder:
    """Records nothing."""

    enabled = False

    def write(self, event: str, **fields: Any) -> None:
        pass

    def close(self) -> None:
        pass


class EventLog:
    """Appends to a file that several processes may share.

    The engine's thread only formats and appends to a list. A daemon thread writes whole lines in one call, so lines of
    different processes do not mix. A killed process loses at most the last fifth of a second.
    """

    enabled = True

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write the event log {path}: {error.strerror}.") from None
        self._count = itertools.count()
        self._lines: deque[str] = deque()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sagellm-events", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, event: str, **fields: Any) -> None:
        if not self.enabled:
            return
        # First what may fail: fields of a plug-in that JSON cannot hold must not leave a gap in `n`, nor take its place.
        body = json.dumps({name: value for name, value in fields.items() if name not in HEAD}, default=_plain)
        head = json.dumps({"t_ns": time.monotonic_ns(), "n": next(self._count), "pid": os.getpid(), "event": event})
        self._lines.append(head if body == "{}" else f"{head[:-1]}, {body[1:]}")

    def close(self) -> None:
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join()
            self.enabled = False  # lines that come now would only pile up
            self._lines.clear()
            os.close(self._file)
            atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._stopped.wait(FLUSH_INTERVAL_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        # Taken one by one: a line that another thread adds meanwhile is either in this write or in the next.
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        data = "".join(f"{line}\n" for line in lines).encode()
        try:
            while data and self.enabled:
                data = data[os.write(self._file, data) :]
        except OSError as error:  # a full disk must not stop the engine, nor may its events pile up in memory
            self.enabled = False
            logger.error("the record ends: event log %s: %s.", self._path, error.strerror)


def open_recorder(path: Path | None) -> Recorder:
    return NullRecorder() if path is None else EventLog(path)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
