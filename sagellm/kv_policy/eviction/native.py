"""The policies in C++, behind the contract of `base.py`: the same decisions as the Python twins, request by request."""

from typing import Any, ClassVar

from sagellm import _core
from sagellm.core.hooks import EvictionDecision
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionPolicy, PolicyContext

__all__ = ["NATIVE", "NativeEvictionPolicy"]


class NativeEvictionPolicy(EvictionPolicy):
    """A policy of `sagellm._core` by its name; the subclasses in `NATIVE` have one each.

    An event takes constant time, or O(log n) where a policy orders blocks by a score. `select_victims` asks the context about
    each block that it comes across, and about none twice in one question.

    Raises:
        PolicyError: bad capacity, an option that the policy has not or that is out of its range; in events as the base.
    """

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity)
        self._native = _core.NativePolicy(self.name, capacity, options)

    def on_insert(self, block: CachedBlock) -> None:
        self._native.on_insert(block)

    def on_hit(self, key: BlockKey, time_s: float = 0.0) -> None:
        self._native.on_hit(key, time_s)

    def on_remove(self, key: BlockKey, evicted: bool = True) -> None:
        self._native.on_remove(key, evicted)

    def select_victims(self, context: PolicyContext) -> EvictionDecision:
        return self._native.select_victims(context)


class NativeFIFO(NativeEvictionPolicy):
    """The block that came first goes; hits change nothing."""

    name: ClassVar[str] = "fifo"


class NativeLRU(NativeEvictionPolicy):
    """The block that was used least recently goes."""

    name: ClassVar[str] = "lru"


class NativeLFU(NativeEvictionPolicy):
    """The block that was used least often goes; among equals the one that came to that frequency first."""

    name: ClassVar[str] = "lfu"


class NativeARC(NativeEvictionPolicy):
    """ARC. Sizes are those of the books: a victim counts until `on_remove`.

    Source: Megiddo and Modha, FAST 2003; request by request as libCacheSim 0.3.5, `ARC.c`.
    """

    name: ClassVar[str] = "arc"


class NativeS3FIFO(NativeEvictionPolicy):
    """S3-FIFO with a queue of `int(small_ratio * capacity)`, ghosts for `int(ghost_ratio * capacity)`, the rest main.

    A block with `move_to_main` hits moves from the small queue to the main one. Until a victim is asked for the first time,
    blocks that find the small queue full go to the main queue.

    Source: Yang et al., SOSP 2023; request by request as libCacheSim 0.3.5, `S3FIFO`, with small_size_ratio .1,
    ghost_size_ratio .9, move_to_main_threshold 2, from a capacity of 20 on. With less its small queue is below 2 places: it
    admits nothing at 10 to 19 and ends the process below 10; here the same rules go on.
    """

    name: ClassVar[str] = "s3fifo"


class NativeSIEVE(NativeEvictionPolicy):
    """SIEVE. The hand passes pinned blocks without forgiving their visit.

    Source: Zhang et al., NSDI 2024; request by request as libCacheSim 0.3.5, `Sieve.c`.
    """

    name: ClassVar[str] = "sieve"


class NativeTwoQ(NativeEvictionPolicy):
    """2Q, full version: options `in_ratio` .25 and `out_ratio` .5 of the capacity.

    Source: Johnson and Shasha, VLDB 1994.
    """

    name: ClassVar[str] = "twoq"


class NativeSLRU(NativeEvictionPolicy):
    """Segmented LRU; `protected_ratio` .8 of the capacity is for blocks that were hit.

    Source: Karedla, Love and Wherry, IEEE Computer 1994.
    """

    name: ClassVar[str] = "slru"


class NativeWTinyLFU(NativeEvictionPolicy):
    """W-TinyLFU: a window of `window_ratio` .01, a segmented LRU behind it, `protected_ratio` .8 of that.

    Source: Einziger, Friedman and Manes, ACM Transactions on Storage 2017.
    """

    name: ClassVar[str] = "wtinylfu"


class NativeGDSF(NativeEvictionPolicy):
    """Frequency times cost over size, aged by the priority of the last victim.

    Source: Cherkasova, HP Labs HPL-98-69R1, 1998.
    """

    name: ClassVar[str] = "gdsf"


class NativePrefixLRU(NativeEvictionPolicy):
    """LRU of leaves: a new block also renews what it continues; of equally old blocks the deepest goes."""

    name: ClassVar[str] = "prefix_lru"


class NativePrefixDepth(NativeEvictionPolicy):
    """The deepest block goes; of equally deep ones the least recently used."""

    name: ClassVar[str] = "prefix_depth"


class NativePrefixReuse(NativeEvictionPolicy):
    """Uses that halve every `half_life` events (4 times the capacity), less `depth_weight` (.25) for each doubling of depth.

    Source: after Lee et al., LRFU, IEEE Transactions on Computers 2001.
    """

    name: ClassVar[str] = "prefix_reuse"


class NativeBelady(NativeEvictionPolicy):
    """The block whose next use is farthest away goes. `future`: the keys of all events, in the order they will be told.

    Source: Belady, IBM Systems Journal 1966.
    """

    name: ClassVar[str] = "belady"


NATIVE: dict[str, type[EvictionPolicy]] = {
    policy.name: policy
    for policy in (
        NativeFIFO, NativeLRU, NativeLFU, NativeARC, NativeS3FIFO, NativeSIEVE, NativeTwoQ, NativeSLRU, NativeWTinyLFU,
        NativeGDSF, NativePrefixLRU, NativePrefixDepth, NativePrefixReuse, NativeBelady,
    )
}  # fmt: skip
