"""The question for victims: blocks that may go, and how they hang together."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sagellm.core.errors import PluginError


class Candidates(NamedTuple):
    """Blocks that may be given up, one row each; the columns of `VictimRequest`."""

    block_ids: np.ndarray
    parent_ids: np.ndarray
    last_access: np.ndarray
    depth: np.ndarray
    on_device: np.ndarray


class VictimRequest:
    """The engine needs `count` blocks of its pool. All arrays have one entry a candidate.

    Candidates form trees: a block continues the prefix of its parent. A set of victims must hold every child of each
    block in it, since a child without its parent can never be found again; `leaf_first` builds such sets.

    An engine may make the arrays when one of them is first read, O(all candidates): a plug-in that keeps books of its own
    need not read any. They can be read inside `select_victims` only; what was read stays.

    Attributes:
        block_ids: int64 [n].
        parent_ids: int64 [n], -1 where the parent is no candidate.
        last_access: int64 [n], a counter; larger is more recent.
        depth: int64 [n], tokens of the prefix up to and including the block.
        on_device: bool [n], False where the bytes were offloaded, so that evicting the block frees no block of the pool.
    """

    __slots__ = ("_make", "_rows", "count")

    def __init__(
        self, count: int, block_ids: np.ndarray, parent_ids: np.ndarray, last_access: np.ndarray, depth: np.ndarray,
        on_device: np.ndarray,
    ) -> None:  # fmt: skip
        self.count = count
        self._rows: Candidates | None = Candidates(block_ids, parent_ids, last_access, depth, on_device)
        self._make: Callable[[], Candidates] | None = None

    @classmethod
    def lazy(cls, count: int, make: Callable[[], Candidates]) -> "VictimRequest":
        """A request whose arrays `make` returns once one of them is read."""
        request = cls.__new__(cls)
        request.count, request._rows, request._make = count, None, make
        return request

    def close(self) -> None:
        """The question was answered: what was not read by now cannot be read any more."""
        self._make = None

    @property
    def candidates(self) -> Candidates:
        """Raises PluginError after the question was answered, unless they were read before."""
        if self._rows is None:
            if (make := self._make) is None:
                raise PluginError("the candidates can be read inside select_victims only.")
            self._rows = make()
        return self._rows

    @property
    def block_ids(self) -> np.ndarray:
        return self.candidates.block_ids

    @property
    def parent_ids(self) -> np.ndarray:
        return self.candidates.parent_ids

    @property
    def last_access(self) -> np.ndarray:
        return self.candidates.last_access

    @property
    def depth(self) -> np.ndarray:
        return self.candidates.depth

    @property
    def on_device(self) -> np.ndarray:
        return self.candidates.on_device

    def leaf_first(self, keys: np.ndarray | None = None) -> list[int]:
        """Victims in rising order of `keys` (default: last access, which is LRU), no block before its children.

        Only blocks on the device are ranked. One that was offloaded goes when the block above it does, and stays otherwise,
        since evicting it frees nothing of the pool. Returns as many as free `count` blocks, or all that free any.
        O(n + victims * log n).
        """
        keys = self.last_access if keys is None else keys
        parent_row, offloaded_below = self._device_forest()
        children = np.bincount([row for row in parent_row if row >= 0], minlength=len(parent_row))
        heap = [(keys[row], row) for row in np.flatnonzero(self.on_device).tolist() if children[row] == 0]
        heapq.heapify(heap)
        victims: list[int] = []
        freed = 0
        while heap and freed < self.count:
            _, row = heapq.heappop(heap)
            victims.extend(int(self.block_ids[below]) for below in offloaded_below.get(row, ()))
            victims.append(int(self.block_ids[row]))
            freed += 1
            parent = parent_row[row]
            if parent >= 0:
                children[parent] -= 1
                if children[parent] == 0:
                    heapq.heappush(heap, (keys[parent], parent))
        return victims

    def _device_forest(self) -> tuple[list[int], dict[int, list[int]]]:
        """For each row on the device the row of the nearest block above it that is on the device too, else -1; and by such
        a row the offloaded ones that hang on it, deepest first."""
        row_of = {int(block): row for row, block in enumerate(self.block_ids)}
        above = [row_of.get(int(parent), -1) for parent in self.parent_ids]
        if self.on_device.all():
            return above, {}
        nearest, offloaded_below = [-1] * len(above), {}
        for row in np.argsort(self.depth, kind="stable").tolist():
            parent = above[row]
            nearest[row] = parent if parent < 0 or self.on_device[parent] else nearest[parent]
            if not self.on_device[row] and nearest[row] >= 0:
                offloaded_below.setdefault(nearest[row], []).insert(0, row)
        return [up if here else -1 for up, here in zip(nearest, self.on_device, strict=True)], offloaded_below
