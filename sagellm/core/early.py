"""Stop signals before anything was started. Imports next to nothing: it must be there first."""

import os
import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def stop_at_once() -> None:
    """A stop signal ends the process with code 0, without a word, until others take the signals over."""
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))
