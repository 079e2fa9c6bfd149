"""A JSON line for each decision, and for each end of a request."""

import json
import logging
import time
from pathlib import Path
from typing import Any

from sagellm.core.errors import ConfigError

__all__ = ["RequestLines"]

logger = logging.getLogger("sagellm.control")


class RequestLines:
    """A JSON object a line: each decision with its reason, and the end of each request. To the log, and to `path` if given.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._file = None
        if path is not None:
            try:
                self._file = path.open("a", buffering=1)
            except OSError as error:
                raise ConfigError(f"cannot write --record {path}: {error.strerror}.") from None

    def write(self, event: str, **fields: Any) -> None:
        if self._file is None and not logger.isEnabledFor(logging.INFO):
            return
        line = json.dumps({"event": event, "t_s": round(time.time(), 6)} | fields)
        logger.info("%s", line)
        if self._file is not None:
            try:
                self._file.write(line + "\n")
            except OSError as error:  # a full disk is no reason to lose requests
                logger.error("--record is not written any more: %s", error.strerror)
                self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
