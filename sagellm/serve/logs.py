"""Where log lines go, and which of LMDeploy's are noise."""

import logging
import os
import sys
from typing import TextIO


def claim_stdout() -> TextIO:
    """A stream on standard output for the lines that programs read.

    All else, of this process and of those it starts, goes to standard error from now on: LMDeploy logs to standard output.
    """
    sys.stdout.flush()
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return ours


def log_to_stderr(level: str) -> None:
    """Log ours to standard error, with a handler of our own: LMDeploy quiets those of the root logger when it is imported."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    ours = logging.getLogger("sagellm")
    ours.addHandler(handler)
    ours.setLevel(level)
    ours.propagate = False


class ClientLeft(logging.Filter):
    """Drops the errors that LMDeploy logs when a client goes away, which is no fault."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        if "exception caught:" not in text:
            return True
        cause = text.partition("exception caught:")[2].strip()
        return cause not in ("", "CancelledError", "GeneratorExit")


CLIENT_LEFT = ClientLeft()  # one, which a logger takes once


def quiet_disconnects() -> None:
    logging.getLogger("lmdeploy").addFilter(CLIENT_LEFT)
