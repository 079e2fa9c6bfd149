"""Time and memory of a process, taken the same way for every contestant. Needs nothing but the standard library."""

import ctypes
import gc
import os
import time
from collections.abc import Callable
from typing import NamedTuple


class Spent(NamedTuple):
    cpu_ns: int
    wall_ns: int


def spent(work: Callable[[], object]) -> Spent:
    """Return the time of one call with the garbage collector off.

    CPU time is of the whole process: a contestant that answers from a thread of its own is charged for it too.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        wall_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        work()
        return Spent(time.process_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns)
    finally:
        if collecting:
            gc.enable()


def resident_bytes() -> int:
    """Resident memory once everything that can be given back has been."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
