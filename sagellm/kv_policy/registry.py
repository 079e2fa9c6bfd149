"""Finds policies and predictors by name: those of this package, those that installed packages offer, and `module:Class`."""

from typing import Any

from sagellm.core.errors import PolicyError
from sagellm.core.registry import Registry
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

_EVICTION = Registry(
    "eviction policy", EvictionPolicy, PolicyError, "sagellm.kv_policies",
    (Fifo, Lru, Lfu, Arc, S3Fifo, Sieve, TwoQ, Slru, WTinyLfu, Gdsf, PrefixLru, PrefixDepth, PrefixReuse, Belady),
    **{"2q": "twoq"},
)  # fmt: skip
_MIGRATION = Registry(
    "migration policy", MigrationPolicy, PolicyError, "sagellm.migration_policies", (Always, Never, CostBenefit)
)
_LIFETIME = Registry(
    "lifetime predictor", LifetimePredictor, PolicyError, "sagellm.lifetime_predictors",
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
