"""A replay with object semantics: every key an object of one flat cache, in row order.

That is the replay with prefix semantics of requests of a single block, one at a time: nothing is held or continued by the
time the next one comes.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sagellm.kv_policy.base import EvictionPolicy
from sagellm.replay.base import ObjectCounts, PrefixCounts
from sagellm.replay.prefix import replay_prefix_reference

PROGRESS_STEP = 4096


def single_blocks(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """int64 [n + 1]: offsets of requests that have one of the n keys each."""
    return np.arange(len(keys) + 1)


def object_counts(counts: PrefixCounts) -> ObjectCounts:
    """Counts of a replay of single blocks."""
    return ObjectCounts(counts.hit_blocks.astype(np.bool_), counts.num_evicted, counts.num_evicted_soon)


def replay_objects_reference(
    policy: EvictionPolicy, keys: NDArray[np.uint64], *, capacity: int, soon: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ObjectCounts:  # fmt: skip
    """On a miss a full cache gives up one block, then the key comes in. In plain Python.

    Args:
        policy: fresh.
        keys: uint64 [n].
        capacity: keys that there is room for.
        soon: an eviction counts as premature if the key is inserted again before that many further accesses; None: capacity.
        on_progress: told how many accesses are done, now and then.

    Raises:
        PolicyError: the policy named no victim, or one that it may not have.
        CapacityError: no room for a block.
    """

    def now_and_then(num_accesses: int) -> None:
        if on_progress is not None and not num_accesses % PROGRESS_STEP:
            on_progress(num_accesses)

    counts = replay_prefix_reference(
        policy, keys, single_blocks(keys), capacity=capacity, soon=soon, on_progress=now_and_then
    )  # fmt: skip
    return object_counts(counts)
