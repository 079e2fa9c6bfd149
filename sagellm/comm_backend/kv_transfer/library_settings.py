"""Settings that a library takes from the environment only, at the moment it is loaded or begins."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["library_settings"]

_LOCK = threading.RLock()  # the environment is the process's


@contextmanager
def library_settings(values: Mapping[str, str]) -> Iterator[None]:
    """The environment has these inside, and afterwards what it had."""
    with _LOCK:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
