"""The part of `torch.cuda` that the engine's host code calls, for a device whose work is done when a call returns."""

import ctypes
import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil

from sagellm.comm_backend.topology import TopologyManager
from sagellm.comm_backend.topology.placement import available_cores, place_workers, usable_nodes
from sagellm.core.errors import CommError

WORKER_CORES = "SAGELLM_WORKER_CORES"  # environment: JSON, a list of cores for each rank


class Stream:
    """A queue that is always empty: the work of a CPU call is finished when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def wait_event(self, event: "Event") -> None:
        pass


class Event:
    """A mark in such a queue: it has always been reached."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._time_ns = 0

    def record(self, stream: Stream | None = None) -> None:
        self._time_ns = time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this mark to `end`."""
        return (end._time_ns - self._time_ns) / 1e6


class CpuRuntime:
    """Stands where the engine writes `torch.cuda`. An attribute that is missing here is one the engine must not need."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self._current = Stream()

    def current_stream(self, device: object = None) -> Stream:
        return self._current

    def default_stream(self, device: object = None) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream):
        yield

    def synchronize(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        """Keep a worker process on the NUMA node that its engine chose; LMDeploy calls this before it loads the model."""
        if isinstance(device, int) and (cores := read_worker_cores(device)):
            os.sched_setaffinity(0, cores)

    def is_available(self) -> bool:
        return True

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        """Without `major`, by which LMDeploy chooses kernels of a GPU."""
        return SimpleNamespace(name="cpu", total_memory=memory_bytes()[1])

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return memory_bytes()


def memory_bytes() -> tuple[int, int]:
    """(available, total) bytes of memory for this process: the machine's, or its control group's when that is less."""
    machine = psutil.virtual_memory()
    available, total = machine.available, machine.total
    for limit_file, used_file in _CGROUP_FILES:
        limit, used = _read_int(limit_file), _read_int(used_file)
        if limit is not None and used is not None and limit < total:
            available, total = min(available, max(0, limit - used)), limit
    return available, total


_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def usable_cores() -> int:
    """Count the cores that this process may compute on: those it is bound to, hyper-threads of one core once, and no more than
    the processor time that its control group has (cgroup v2)."""
    cores = len({_siblings(number) for number in os.sched_getaffinity(0)})
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return cores


_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_TOPOLOGY = Path("/sys/devices/system/cpu")


def _siblings(number: int) -> str:
    """Return what is the same for all hyper-threads of a core."""
    try:
        return (_TOPOLOGY / f"cpu{number}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(number)


def write_worker_cores(num_workers: int) -> None:
    """Choose the cores of each tensor-parallel worker, whole NUMA nodes, and leave them to processes spawned from now on.

    A process takes its memory from the node that it runs on, so the part of the weights and of the KV cache that a worker
    reads is local to it.
    """
    os.environ.pop(WORKER_CORES, None)
    if num_workers < 2:
        return
    try:
        info = TopologyManager().info
    except CommError:  # no sysfs: nothing is known of nodes
        return
    cores = available_cores()
    if len(usable_nodes(info, cores)) > 1:
        os.environ[WORKER_CORES] = json.dumps([place.cores for place in place_workers(info, cores, num_workers)])


def read_worker_cores(rank: int) -> list[int]:
    """Return the cores of worker `rank`; empty if workers are not bound."""
    every = json.loads(os.environ.get(WORKER_CORES, "[]"))
    return every[rank] if rank < len(every) else []


MADV_HUGEPAGE, HUGE_PAGE_BYTES = 14, 2 << 20


def use_huge_pages(address: int, num_bytes: int) -> bool:
    """Ask Linux for pages of 2 MiB in this memory, before it is used. Returns False if it gives none.

    Keys of a sequence lie in blocks all over the cache. With pages of 4 KiB each of them costs a walk through page tables.
    """
    begin = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if begin >= end or madvise is None:
        return False
    return madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_HUGEPAGE) == 0


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


def keep_freed_memory(trim_bytes: int = 256 << 20, mmap_bytes: int = 32 << 20) -> bool:
    """Ask glibc to reuse what large temporaries leave behind; False where the C library is another.

    By default every temporary of a prefill is a fresh mapping, whose pages the kernel clears again at each use. 32 MiB is
    the largest threshold that glibc takes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, mmap_bytes), (M_TRIM_THRESHOLD, trim_bytes))
    return all([mallopt(name, value) == 1 for name, value in settings])
