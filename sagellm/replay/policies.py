"""Which policies a replay runs, by name, and whether the native code can run the whole replay."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sagellm.core.errors import PolicyError
from sagellm.kv_policy import find_policy, make_policy
from sagellm.kv_policy.base import EvictionPolicy
from sagellm.kv_policy.eviction.native import NATIVE
from sagellm.replay.belady import Belady
from sagellm.replay.guarded import Guarded, blamed

BELADY = Belady.name
OWN = "sagellm.kv_policy.eviction."  # where the policies are that need no guard


class Contestant(NamedTuple):
    """A policy of a replay. `name`: as reported; `build`: a fresh instance for a capacity, None for Belady's, which needs the
    trace; `is_native`: `sagellm._core` knows it by this name."""

    name: str
    options: dict[str, Any]
    build: Callable[[int], EvictionPolicy] | None
    is_native: bool


def policy_name(name: str) -> str:
    """One spelling for all that name the same policy of ours; other names as they are."""
    if ":" in name:
        return name
    plain = re.sub(r"[-_\s]", "", name.lower())
    if plain == BELADY:
        return BELADY
    try:
        kind = find_policy(name, reference=True)
    except PolicyError:  # told when it is looked for
        return name
    own_name = getattr(kind, "name", None)
    return own_name if kind.__module__.startswith(OWN) else name


def find_contestant(name: str, options: dict[str, Any], *, reference: bool) -> Contestant:
    """Args: `name`: as `sagellm policy list` has it, or `module:Class`. `reference`: the Python twin, even where there is
    native code.

    Raises:
        PolicyError: unknown, or options that it does not take.
    """
    name = policy_name(name)
    if name == BELADY:
        if options:
            raise PolicyError(f"policy {BELADY} takes no options here; its future is the trace. Got {sorted(options)}.")
        return Contestant(BELADY, {}, None, not reference)
    with blamed(name, "its module"):  # a module that is imported may raise anything
        kind = find_policy(name, reference=reference)
    own_name = getattr(kind, "name", None)
    if not isinstance(own_name, str):
        raise PolicyError(f'policy {name}: the class has no name; give it one, as in name = "mine".')

    def build(capacity: int) -> EvictionPolicy:
        return make_policy(name, capacity, reference=reference, **options)

    if kind.__module__.startswith(OWN):
        return Contestant(own_name, options, build, NATIVE.get(own_name) is kind)
    shown = name if ":" in name else own_name
    return Contestant(shown, options, lambda capacity: Guarded(shown, capacity, build), False)
