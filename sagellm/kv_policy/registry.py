"""Finds policies and predictors by name: those of this package, those that installed packages offer, and `module:Class`."""

import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from sagellm.core.errors import PolicyError, SageError
from sagellm.core.registry import load_object, load_offered, offered_names
from sagellm.kv_policy.base import EvictionPolicy, LifetimePredictor, MigrationPolicy
from sagellm.kv_policy.eviction.arc import Arc
from sagellm.kv_policy.eviction.belady import Belady
from sagellm.kv_policy.eviction.fifo import Fifo
from sagellm.kv_policy.eviction.gdsf import Gdsf
from sagellm.kv_policy.eviction.lfu import Lfu
from sagellm.kv_policy.eviction.lru import Lru
from sagellm.kv_policy.eviction.native import NATIVE
from sagellm.kv_policy.eviction.prefix_depth import PrefixDepth
from sagellm.kv_policy.eviction.prefix_lru import PrefixLru
from sagellm.kv_policy.eviction.prefix_reuse import PrefixReuse
from sagellm.kv_policy.eviction.s3fifo import S3Fifo
from sagellm.kv_policy.eviction.sieve import Sieve
from sagellm.kv_policy.eviction.slru import Slru
from sagellm.kv_policy.eviction.twoq import TwoQ
from sagellm.kv_policy.eviction.wtinylfu import WTinyLfu
from sagellm.kv_policy.lifetime.exponential import ExponentialLifetime
from sagellm.kv_policy.lifetime.history import HistoryLifetime
from sagellm.kv_policy.lifetime.learned import LearnedLifetime
from sagellm.kv_policy.migration.always import Always
from sagellm.kv_policy.migration.cost_benefit import CostBenefit
from sagellm.kv_policy.migration.never import Never

__all__ = [
    "find_lifetime_predictor", "find_migration_policy", "find_policy", "lifetime_predictor_names", "make_lifetime_predictor",
    "make_migration_policy", "make_policy", "migration_policy_names", "policy_names",
]  # fmt: skip

Kind = TypeVar("Kind", EvictionPolicy, MigrationPolicy, LifetimePredictor)


class _Registry(Generic[Kind]):
    """Classes by name. Capitals, `-` and `_` do not count; a name of this package goes before one that others offer."""

    def __init__(self, what: str, base: type[Kind], group: str, own: tuple[type[Kind], ...], **aliases: str) -> None:
        self._what = what
        self._base = base
        self._group = group
        self._own = {kind.name: kind for kind in own}
        self._aliases = aliases

    def names(self) -> list[str]:
        """Names of this package, in the order of the documentation, then those that installed packages offer."""
        known = {_plain(name) for name in self._own}
        return [*self._own, *(name for name in offered_names(self._group) if _plain(name) not in known)]

    def find(self, name: str) -> type[Kind]:
        found = load_object(name, self._what, PolicyError) if ":" in name else self._find_named(name)
        if not (isinstance(found, type) and issubclass(found, self._base)):
            base = f"{self._base.__module__}.{self._base.__name__}"
            raise PolicyError(f"{name} is {found!r}, no {self._what}; give a subclass of {base}.")
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise PolicyError(f"{self._what} {name} is abstract; define {', '.join(missing)}.")
        if not (isinstance(own_name := getattr(found, "name", None), str) and own_name):
            raise PolicyError(f"{self._what} {name} has no name; give the class a text `name`.")
        return found

    def make(self, kind: Callable[..., Kind], name: str, *arguments: Any, **options: Any) -> Kind:
        try:
            return kind(*arguments, **options)
        except SageError:
            raise
        except (Exception, SystemExit) as error:
            raise PolicyError(f"{self._what} {name} cannot be built with options {options}: {error!r}") from error

    def _find_named(self, name: str) -> object:
        wanted = _plain(name)
        wanted = _plain(self._aliases.get(wanted, wanted))
        for own_name, kind in self._own.items():  # first, since looking through what is installed takes milliseconds
            if _plain(own_name) == wanted:
                return kind
        for offered in offered_names(self._group):
            if _plain(offered) == wanted:
                return load_offered(offered, self._group, self._what, PolicyError)
        raise PolicyError(
            f"unknown {self._what} {name!r}; known are: {', '.join(self.names())}. Or name a class as module:Class."
        )


def _plain(name: str) -> str:
    return re.sub(r"[-_\s]", "", name.lower())


_EVICTION = _Registry(
    "eviction policy", EvictionPolicy, "sagellm.kv_policies",
    (Fifo, Lru, Lfu, Arc, S3Fifo, Sieve, TwoQ, Slru, WTinyLfu, Gdsf, PrefixLru, PrefixDepth, PrefixReuse, Belady),
    **{"2q": "twoq"},
)  # fmt: skip
_MIGRATION = _Registry("migration policy", MigrationPolicy, "sagellm.migration_policies", (Always, Never, CostBenefit))
_LIFETIME = _Registry(
    "lifetime predictor", LifetimePredictor, "sagellm.lifetime_predictors",
    (ExponentialLifetime, HistoryLifetime, LearnedLifetime),
)  # fmt: skip


def policy_names() -> list[str]:
    """Names that `find_policy` knows."""
    return _EVICTION.names()


def find_policy(name: str, reference: bool = False) -> type[EvictionPolicy]:
    """The class of that name; `reference`: the one in plain Python, where there is a native one too.

    Raises:
        PolicyError: unknown, cannot be loaded, or no eviction policy.
    """
    found = _EVICTION.find(name)
    is_own = ":" not in name and found.__module__.startswith(f"{__package__}.")
    return NATIVE.get(found.name, found) if is_own and not reference else found


def make_policy(name: str, capacity: int, reference: bool = False, **options: Any) -> EvictionPolicy:
    """A policy for a tier with room for `capacity` blocks.

    Raises:
        PolicyError: as `find_policy`; bad capacity or options.
    """
    return _EVICTION.make(find_policy(name, reference), name, capacity, **options)


def migration_policy_names() -> list[str]:
    return _MIGRATION.names()


def find_migration_policy(name: str) -> type[MigrationPolicy]:
    """As `find_policy`."""
    return _MIGRATION.find(name)


def make_migration_policy(name: str, **options: Any) -> MigrationPolicy:
    """As `make_policy`."""
    return _MIGRATION.make(find_migration_policy(name), name, **options)


def lifetime_predictor_names() -> list[str]:
    return _LIFETIME.names()


def find_lifetime_predictor(name: str) -> type[LifetimePredictor]:
    """As `find_policy`."""
    return _LIFETIME.find(name)


def make_lifetime_predictor(name: str, **options: Any) -> LifetimePredictor:
    """As `make_policy`."""
    return _LIFETIME.make(find_lifetime_predictor(name), name, **options)
