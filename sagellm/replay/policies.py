"""Which policies a replay runs, by name, and whether the native code can run the whole replay."""

from collections.abc import Callable
from typing import Any, NamedTuple

from sagellm.core.errors import PolicyError
from sagellm.kv_policy import find_policy, make_policy
from sagellm.kv_policy.base import EvictionPolicy
from sagellm.kv_policy.eviction.native import NATIVE
from sagellm.replay.belady import Belady

BELADY = Belady.name


class Contestant(NamedTuple):
    """A policy of a replay. `name`: as reported; `build`: a fresh instance for a capacity, None for Belady's, which needs the
    trace; `is_native`: `sagellm._core` knows it by this name."""

    name: str
    options: dict[str, Any]
    build: Callable[[int], EvictionPolicy] | None
    is_native: bool


def find_contestant(name: str, options: dict[str, Any], *, reference: bool) -> Contestant:
    """Args: `name`: as `sagellm policy list` has it, or `module:Class`. `reference`: the Python twin, even where there is
    native code.

    Raises:
        PolicyError: unknown, or options that it does not take.
    """
    if name.lower() == BELADY:
        if options:
            raise PolicyError(f"policy {BELADY} takes no options here; its future is the trace. Got {sorted(options)}.")
        return Contestant(BELADY, {}, None, not reference)
    kind = find_policy(name, reference=reference)
    is_native = NATIVE.get(kind.name) is kind
    shown = name if ":" in name else kind.name

    def build(capacity: int) -> EvictionPolicy:
        return make_policy(name, capacity, reference=reference, **options)

    return Contestant(shown, options, build, is_native)
