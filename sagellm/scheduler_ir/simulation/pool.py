"""The engine's blocks as counts: free ones, those that requests hold, and cached prefixes without a request."""

from collections import OrderedDict

from sagellm.core.hooks import RequestId
from sagellm.scheduler_ir.simulation.base import EngineShape
from sagellm.scheduler_ir.simulation.requests import VirtualRequest

__all__ = ["BlockPool"]


class BlockPool:
    """Which prefixes two requests share is not known, but how many tokens of each are said to be cached: so many blocks it
    takes from the cache at its first admission, if there are any. Blocks that a request loses can be found again until
    they are evicted, least recently used first."""

    def __init__(self, shape: EngineShape) -> None:
        self._shape = shape
        self.num_free = shape.num_blocks
        self._cached: OrderedDict[RequestId, int] = OrderedDict()  # whose they were, the longest unused first

    def num_needed(self, request: VirtualRequest, num_ahead: int) -> int:
        """Blocks that it lacks for all of its tokens and `num_ahead` more."""
        return max(0, self._shape.blocks_of(request.num_tokens + num_ahead) - request.num_blocks)

    def hold(self, request: VirtualRequest, num_blocks: int) -> None:
        self.num_free -= num_blocks
        request.num_blocks += num_blocks

    def find(self, request: VirtualRequest) -> None:
        """It holds the blocks of its prompt that are cached, and has their tokens."""
        if request.num_computed or not self._shape.prefix_caching:
            return
        size = self._shape.block_size
        first = request.cached_tokens // size
        found = self._cached.pop(request.request_id, 0) if request.has_run else self._take_newest(first)
        request.num_blocks += found
        request.num_computed = min(found * size, request.num_tokens - 1)

    def _take_newest(self, count: int) -> int:
        """Up to so many blocks of what is cached; what lacks is shared with a request that runs, and counted as free ones."""
        left = count
        while left and self._cached:
            owner, blocks = self._cached.popitem()
            taken = min(blocks, left)
            left -= taken
            if blocks > taken:
                self._cached[owner] = blocks - taken
        shared = min(left, self.num_free)
        self.num_free -= shared
        return count - left + shared

    def release(self, request: VirtualRequest) -> None:
        """It loses all its blocks, and with them what it has computed; full ones stay cached."""
        full = min(request.num_computed // self._shape.block_size, request.num_blocks) if self._shape.prefix_caching else 0
        self.num_free += request.num_blocks - full
        if full:
            self._cached[request.request_id] = self._cached.pop(request.request_id, 0) + full
        request.num_blocks = request.num_computed = 0

    def evict_cached(self, count: int) -> None:
        """Free up to so many blocks of prefixes without a request."""
        while count > 0 and self._cached:
            owner = next(iter(self._cached))
            gone = min(count, self._cached[owner])
            self._cached[owner] -= gone
            if not self._cached[owner]:
                del self._cached[owner]
            self.num_free += gone
            count -= gone
