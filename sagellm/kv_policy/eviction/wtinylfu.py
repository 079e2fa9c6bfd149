"""Window TinyLFU: what leaves a small LRU window must be used more often than what it would replace."""

from typing import Any

from sagellm.kv_policy.arguments import check_option, require_new, require_present
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionDecision, EvictionPolicy, PolicyContext
from sagellm.kv_policy.eviction.queues import Queue, first_evictable, move_first

__all__ = ["CountMinSketch", "WTinyLfu"]

MASK = 2**64 - 1
LARGEST_WIDTH = 2**22  # counters of a row


def mix64(value: int) -> int:
    """The last step of SplitMix64: each bit of the result depends on all of the value. Source: Steele et al., OOPSLA 2014."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


class CountMinSketch:
    """How often keys were used lately, at most 15: four counters a key, each shared with other keys; the lowest counts. After
    ten uses a block of the capacity all counters are halved, rounded down. Beyond 4 million blocks of capacity there are no
    more counters than for 4 million, and they are halved as often.

    Source: Cormode and Muthukrishnan, J. Algorithms 2005; halving: Einziger, Friedman and Manes, ACM ToS 2017.
    """

    def __init__(self, capacity: int) -> None:
        self._width = 16
        while self._width < min(capacity, LARGEST_WIDTH):
            self._width *= 2
        self._rows = [bytearray(self._width) for _ in range(4)]
        self._num_added = 0
        self._sample_size = 10 * min(capacity, LARGEST_WIDTH)

    def add(self, key: int) -> None:
        for row, place in zip(self._rows, self._places(key), strict=True):
            row[place] = min(row[place] + 1, 15)
        self._num_added += 1
        if self._num_added == self._sample_size:
            self._rows = [bytearray(count // 2 for count in row) for row in self._rows]
            self._num_added //= 2

    def estimate(self, key: int) -> int:
        return min(row[place] for row, place in zip(self._rows, self._places(key), strict=True))

    def _places(self, key: int) -> list[int]:
        return [mix64((key + 0x9E3779B97F4A7C15 * (row + 1)) & MASK) & (self._width - 1) for row in range(4)]


class WTinyLfu(EvictionPolicy):
    """Admit to the main part only blocks that were used more often lately than the block they would replace.

    New blocks enter the window, an LRU list. Blocks that leave it go on probation, and a hit protects them as in `Slru`.
    When room is needed, the window's least recently used block competes with that of the main part (on probation, else
    protected). The less used one is evicted, the window's if both are equal; otherwise the window's goes on probation.

    Options: `window_ratio` (.01) of the capacity, rounded down, at least one block; `protected_ratio` (.8) of the rest.

    libCacheSim's W-TinyLFU differs in the hash functions and the aging of its sketch, and has an SLRU of four segments as
    its main part. Below 100 objects its window has no room and it admits nothing. Hit rates differ by less than 0.01 from
    100 to 5,000 objects of a Zipf 1.0 trace.

    Source: Einziger, Friedman and Manes, "TinyLFU", ACM ToS 2017. No doorkeeper, and the window's size is fixed.
    """

    name = "wtinylfu"

    def __init__(
        self, capacity: int, *, window_ratio: float = 0.01, protected_ratio: float = 0.8, **options: Any
    ) -> None:  # fmt: skip
        super().__init__(capacity, **options)
        self._window_limit = max(1, int(check_option(self.name, "window_ratio", window_ratio) * capacity))
        protected_ratio = check_option(self.name, "protected_ratio", protected_ratio)
        self._protected_limit = int(protected_ratio * (capacity - self._window_limit))
        self._window: Queue = Queue()
        self._probation: Queue = Queue()
        self._protected: Queue = Queue()
        self._sketch = CountMinSketch(capacity)

    def on_insert(self, block: CachedBlock) -> None:
        require_new(block, self._window, self._probation, self._protected)
        self._sketch.add(block.key)
        self._window[block.key] = None
        if len(self._window) > self._window_limit:
            move_first(self._window, self._probation)

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        require_present(key, self._window, self._probation, self._protected)
        self._sketch.add(key)
        if key in self._window:
            self._window.move_to_end(key)
            return
        self._probation.pop(key, None)
        self._protected[key] = None
        self._protected.move_to_end(key)
        while len(self._protected) > self._protected_limit:
            move_first(self._protected, self._probation)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        require_present(key, self._window, self._probation, self._protected)
        for queue in (self._window, self._probation, self._protected):
            queue.pop(key, None)

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        while context.missing > 0:
            is_full = len(self._window) >= self._window_limit
            candidate = first_evictable(self._window, context)
            segment, rival = "probation", first_evictable(self._probation, context)
            if rival is None:
                segment, rival = "protected", first_evictable(self._protected, context)
            if candidate is None and rival is None:
                break
            if rival is None or (candidate is not None and is_full and not self._is_used_more(candidate, rival)):
                segment, rival = "window", candidate
            elif candidate is not None and is_full:
                del self._window[candidate]
                self._probation[candidate] = None
            assert rival is not None
            context.take(rival, f"{segment}, estimate {self._sketch.estimate(rival)}")
        return context.decision()

    def _is_used_more(self, candidate: BlockKey, rival: BlockKey) -> bool:
        return self._sketch.estimate(candidate) > self._sketch.estimate(rival)
