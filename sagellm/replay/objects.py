"""A replay with object semantics, in plain Python: every key an object of one flat cache, in row order."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sagellm.core.errors import CapacityError, PolicyError
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionPolicy, PolicyContext, check_decision
from sagellm.replay.base import ObjectCounts

PROGRESS_STEP = 4096


class _Flat:
    """A view on blocks that nothing pins."""

    def __init__(self) -> None:
        self.resident: set[BlockKey] = set()

    def num_pins(self, key: BlockKey) -> int:
        if key not in self.resident:
            raise KeyError(key)
        return 0

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return None


def replay_objects_reference(
    policy: EvictionPolicy, keys: NDArray[np.uint64], *, capacity: int, soon: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ObjectCounts:  # fmt: skip
    """On a miss a full cache gives up one block, then the key comes in.

    Args:
        policy: fresh.
        keys: uint64 [n].
        capacity: keys that there is room for.
        soon: an eviction counts as premature if the key is inserted again before that many further accesses; None: capacity.
        on_progress: told how many accesses are done, now and then.

    Raises:
        PolicyError: the policy named no victim, or one that it may not have.
    """
    if capacity < 1:
        raise CapacityError(f"capacity {capacity}: room for at least one block is needed.")
    view, soon = _Flat(), capacity if soon is None else soon
    resident = view.resident
    tell_request = getattr(policy, "on_request", None)
    hits = np.zeros(len(keys), np.bool_)
    evicted_at: dict[BlockKey, int] = {}
    num_evicted = num_evicted_soon = 0
    try:
        for place, key in enumerate(keys.tolist()):
            if tell_request is not None:
                tell_request(place)
            if key in resident:
                hits[place] = True
                policy.on_hit(key)
            else:
                if len(resident) == capacity:
                    victim = _victim(policy, view, key)
                    resident.remove(victim)
                    policy.on_remove(victim, True)
                    evicted_at[victim] = place + 1
                    num_evicted += 1
                gone_at = evicted_at.pop(key, None)
                num_evicted_soon += gone_at is not None and place + 1 - gone_at < soon
                resident.add(key)
                policy.on_insert(CachedBlock(key))
            if on_progress is not None and not (place + 1) % PROGRESS_STEP:
                on_progress(place + 1)
    except PolicyError as error:
        raise PolicyError(f"access {place}: {error}") from error
    return ObjectCounts(hits, num_evicted, num_evicted_soon)


def _victim(policy: EvictionPolicy, view: _Flat, incoming: BlockKey) -> BlockKey:
    decision = policy.select_victims(PolicyContext(1, view, incoming=(incoming,)))
    victims = check_decision(decision, PolicyContext(1, view)).victims
    if not victims:
        raise PolicyError(f"policy {policy.name} gave no victim where every block may go.")
    return BlockKey(victims[0])
