"""A flat cache of single objects around a policy, as simulators of web and block caches have it."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sagellm.core.errors import PolicyError
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionPolicy, PolicyContext, check_decision

__all__ = ["ReferenceObjectCache"]


class ReferenceObjectCache:
    """Room for `capacity` objects of one size; nothing is pinned and there are no prefixes.

    The plain twin of the native `ObjectCache`: a hit is told to the policy; a miss in a full cache asks it for one victim,
    naming what comes, removes that and inserts what comes.

    Raises:
        PolicyError: the policy names a foreign victim, or none.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._keys: dict[BlockKey, None] = {}
        self.num_evicted = 0

    def access(self, key: int) -> bool:
        """Ask for the object, which is there afterwards. Returns whether it was before."""
        block = BlockKey(key)
        if block in self._keys:
            self._policy.on_hit(block)
            return True
        if len(self._keys) == self._capacity:
            self._make_room(block)
        self._policy.on_insert(CachedBlock(block))
        self._keys[block] = None
        return False

    def access_many(self, keys: NDArray[np.int64] | NDArray[np.uint64] | Iterable[int]) -> NDArray[np.bool_]:
        """`access` for each of n keys in turn; bool [n]."""
        keys = keys.tolist() if isinstance(keys, np.ndarray) else keys
        return np.fromiter((self.access(key) for key in keys), dtype=bool)

    def keys(self) -> list[int]:
        """Return the keys in the cache, in order of insertion."""
        return list(self._keys)

    def num_pins(self, key: BlockKey) -> int:
        self._keys[key]  # KeyError where it is not on the tier
        return 0

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        return None

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def _make_room(self, incoming: BlockKey) -> None:
        decision = self._policy.select_victims(PolicyContext(1, self, incoming=(incoming,)))
        decision = check_decision(decision, PolicyContext(1, self))
        for victim in decision.victims:
            key = BlockKey(victim)
            del self._keys[key]
            self._policy.on_remove(key, evicted=True)
            self.num_evicted += 1
        if not decision.victims:
            raise PolicyError(
                f"policy {self._policy.name} gave no victim of {len(self)} objects that may go; it has to."
            )
