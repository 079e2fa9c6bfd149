"""Start and end of processes. Imports next to nothing: it must be there first."""

import atexit
import os
import signal
import sys
from typing import NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
ENGINE_NAME = "sagellm-engine"  # of a server's engine process in `top` and `ps -o comm`
_skips_teardown = False


def stop_at_once() -> None:
    """A stop signal ends the process with code 0, without a word, until others take the signals over."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))


def skip_teardown() -> None:
    """Let `end` leave out the teardown of the interpreter.

    It takes a second to search every object of every library for cycles, and some libraries then report leaks.
    """
    global _skips_teardown
    _skips_teardown = True


def end(code: int) -> NoReturn:
    """End the process with this exit code, after the handlers of `atexit`."""
    if not _skips_teardown:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
