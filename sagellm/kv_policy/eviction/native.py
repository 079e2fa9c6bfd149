"""The policies in C++, behind the contract of `base.py`: the same decisions as the Python twins, request by request."""

from typing import Any

from sagellm import _core
from sagellm.core.hooks import EvictionDecision
from sagellm.kv_policy.base import BlockKey, CachedBlock, EvictionPolicy, PolicyContext

__all__ = ["NATIVE", "NativeEvictionPolicy"]


class NativeEvictionPolicy(EvictionPolicy):
    """A policy of `sagellm._core`; `NATIVE` holds a subclass for each that the native module has, by name.

    An event takes constant time, or O(log n) where a policy orders blocks by a score. `select_victims` asks the context about
    each block that it comes across once.

    Raises:
        PolicyError: bad capacity, an unknown option, or one out of its range; in events as the base.
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


# The rules and options of each policy are in the docstring of its twin: the file of the same name in this folder.
NATIVE: dict[str, type[EvictionPolicy]] = {
    name: type(
        f"Native_{name}", (NativeEvictionPolicy,), {"name": name, "__module__": __name__, "__doc__": f"{name}, in C++."}
    )
    for name in _core.policy_names()
}
