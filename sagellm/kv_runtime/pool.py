"""A pool of equally large slots in one area of memory, for the bytes of KV blocks."""

import heapq
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from sagellm.core.errors import CapacityError, TierError
from sagellm.core.hooks import Tier
from sagellm.kv_runtime.base import AllocationResult, BlockBytes
from sagellm.kv_runtime.fragmentation import fragmentation, free_runs

__all__ = ["KVPool"]


class KVPool:
    """Slots 0 to `capacity_blocks` - 1 of `block_bytes` bytes each, one behind the other. Thread-safe.

    The lowest free slot is given out first, O(log n), which keeps free slots together at the end while there is a choice.

    Args:
        capacity_blocks: slots, at least 1.
        block_bytes: bytes of a slot, at least 1.
        tier: named in results and messages.
        memory: uint8 [capacity_blocks * block_bytes], contiguous and writable, such as pinned memory of a device's runtime;
            by default plain memory of the process, page-aligned, that takes room as slots are first written.

    Raises:
        TierError: sizes or memory that cannot be used.
        CapacityError: the memory cannot be had.
    """

    def __init__(
        self, capacity_blocks: int, block_bytes: int, tier: Tier = Tier.CPU, memory: NDArray[np.uint8] | None = None
    ) -> None:
        if not (_is_whole(capacity_blocks) and _is_whole(block_bytes)) or capacity_blocks < 1 or block_bytes < 1:
            raise TierError(
                f"a pool of {capacity_blocks!r} blocks of {block_bytes!r} bytes holds nothing; give at least 1 of 1."
            )
        num_bytes = capacity_blocks * block_bytes
        self.capacity_blocks = capacity_blocks
        self.block_bytes = block_bytes
        self.tier = tier
        self._memory = _plain_memory(num_bytes) if memory is None else _checked(memory, num_bytes)
        self._lock = threading.Lock()
        self._free = np.ones(capacity_blocks, bool)
        self._is_free = memoryview(self._free)  # the same flags; quicker one by one
        self._num_free = capacity_blocks
        # Every free slot is in it; a slot that was taken from the middle of a run stays until it comes up, and is skipped.
        self._heap = list(range(capacity_blocks))

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.capacity_blocks - self._num_free

    def allocate(self, count: int, *, contiguous: bool = False) -> AllocationResult:
        """`count` slots, rising; `contiguous`: one behind the other, from the smallest run that is large enough.

        Raises:
            CapacityError: fewer are free, or fewer lie together; nothing was taken.
        """
        if not _is_whole(count) or count < 0:
            raise TierError(f"{count!r} slots asked for; ask for 0 or more.")
        with self._lock:
            if count > self._num_free:
                raise CapacityError(
                    f"{count} blocks wanted, {self._num_free} of {self.capacity_blocks} free on tier {self.tier.value}; "
                    "free some first."
                )
            slots = self._run(count) if contiguous else self._lowest(count)
            for slot in slots:
                self._is_free[slot] = False
            self._num_free -= count
        return AllocationResult(tuple(slots), self.tier)

    def free(self, block_ids: Sequence[int]) -> None:
        """Give slots back.

        Raises:
            TierError: a slot that is not in use, or named twice; nothing was freed.
        """
        with self._lock:
            is_free, num_freed = self._is_free, 0
            for slot in block_ids:
                if not self._is_used(slot):  # or no longer, as it is named twice
                    for freed in block_ids[:num_freed]:
                        is_free[freed] = False
                    raise TierError(
                        f"slot {slot!r} of tier {self.tier.value} is not in use; free what was allocated, once."
                    )
                is_free[slot] = True
                num_freed += 1
            for slot in block_ids:
                heapq.heappush(self._heap, int(slot))
            self._num_free += num_freed
            if len(self._heap) > 2 * self.capacity_blocks:
                self._heap = np.flatnonzero(self._free).tolist()

    def view(self, slot: int) -> BlockBytes:
        """uint8 [block_bytes]: the slot's memory itself. Raises TierError: not in use."""
        if not self._is_used(slot):
            raise TierError(f"slot {slot!r} of tier {self.tier.value} is not in use; allocate it first.")
        return self._bytes_of(slot)

    def get_utilization(self) -> float:
        """Share of the slots in use, 0 to 1."""
        return self.num_used / self.capacity_blocks

    def get_fragmentation(self) -> float:
        """How scattered the free slots are (`fragmentation`), 0 to 1. O(capacity)."""
        with self._lock:
            return fragmentation(self._free)

    def _is_used(self, slot: int) -> bool:
        try:
            return 0 <= slot < self.capacity_blocks and not self._is_free[slot]
        except TypeError:  # no whole number
            return False

    def _bytes_of(self, slot: int) -> BlockBytes:
        return self._memory[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def _lowest(self, count: int) -> list[int]:
        slots: list[int] = []
        while len(slots) < count:
            slot = heapq.heappop(self._heap)
            if self._is_free[slot] and (not slots or slots[-1] != slot):
                slots.append(slot)
        return slots

    def _run(self, count: int) -> list[int]:
        firsts, lengths = free_runs(self._free)
        fitting = np.flatnonzero(lengths >= count)
        if count and not len(fitting):
            raise CapacityError(
                f"{count} blocks in one run wanted; {self._num_free} are free on tier {self.tier.value}, at most "
                f"{lengths.max()} in one run; free some first."
            )
        first = int(firsts[fitting[np.argmin(lengths[fitting])]]) if count else 0
        return list(range(first, first + count))


def _is_whole(number: object) -> bool:
    """A whole number, numpy's among them."""
    return type(number) is int or (isinstance(number, (int, np.integer)) and not isinstance(number, bool))


def _plain_memory(num_bytes: int) -> NDArray[np.uint8]:
    try:
        area = mmap.mmap(-1, num_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise CapacityError(f"{num_bytes} bytes of memory cannot be had: {error}; make the pool smaller.") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: slower, not wrong
            area.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(area, np.uint8)


def _checked(memory: NDArray[np.uint8], num_bytes: int) -> NDArray[np.uint8]:
    if memory.dtype != np.uint8 or memory.shape != (num_bytes,) or not memory.flags.c_contiguous:
        raise TierError(
            f"memory is {memory.dtype} {list(memory.shape)}; a pool needs contiguous uint8 [{num_bytes}], blocks times bytes."
        )
    if not memory.flags.writeable:
        raise TierError("memory is read-only; a pool needs memory that it can write.")
    return memory
