"""Sees which clocks and unseeded random numbers are read while something runs, however they were imported."""

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, datetime
from types import FrameType
from typing import Any

__all__ = ["watched"]

CLOCKS = (
    "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "process_time_ns",
    "thread_time", "thread_time_ns", "clock_gettime", "clock_gettime_ns", "localtime", "gmtime", "ctime", "strftime", "sleep",
)  # fmt: skip
DATES = ("now", "utcnow", "today")


@contextmanager
def watched(read: Callable[[str], None]) -> Iterator[None]:
    """Calls `read` with the name of each clock or shared random source that this thread calls meanwhile.

    A seeded generator of the strategy's own is allowed. One without a seed, and numpy's, show in a second run.
    No garbage is collected meanwhile: what others do when it is, such as measuring how long that takes, is not the strategy's.
    """
    clocks = {getattr(time, name): f"time.{name}" for name in CLOCKS if hasattr(time, name)} | {os.urandom: "os.urandom"}

    def name_of(called: Any) -> str | None:
        owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
        if owner is random._inst:  # what the functions of the module are methods of
            return f"random.{name}"
        if isinstance(owner, type) and issubclass(owner, date) and name in DATES:
            return f"{'datetime' if issubclass(owner, datetime) else 'date'}.{name}"
        try:
            return clocks.get(called)
        except TypeError:  # it cannot be hashed
            return None

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and (name := name_of(called)) is not None:
            read(name)

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what others do when garbage is collected, on whatever thread that happens, is not the strategy's
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
