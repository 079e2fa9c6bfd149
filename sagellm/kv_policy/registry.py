"""Find policies and predictors by name: the files of this package, installed packages, and `module:Class`."""

from typing import Any

from sagellm.core.errors import PolicyError
from sagellm.core.registry import Registry
from sagellm.kv_policy.base import EvictionPolicy, LifetimePredictor, MigrationPolicy
from sagellm.kv_policy.eviction.native import NATIVE

__all__ = [
    "LIFETIMES", "MIGRATIONS", "POLICIES", "find_lifetime_predictor", "find_migration_policy", "find_policy",
    "lifetime_predictor_names", "make_lifetime_predictor", "make_migration_policy", "make_policy", "migration_policy_names",
    "policy_names",
]  # fmt: skip


class _Policies(Registry[EvictionPolicy]):
    def find(self, name: str, reference: bool = False) -> type[EvictionPolicy]:
        """Return the policy of that name. `reference` selects the twin in plain Python if there is a native one.

        Raises:
            PolicyError: unknown, cannot be loaded, or not an eviction policy.
        """
        found = super().find(name)
        is_own = ":" not in name and found.__module__.startswith(f"{__package__}.")
        return NATIVE.get(found.name, found) if is_own and not reference else found

    def describe(self, name: str) -> dict[str, Any]:
        """Return facts for lists: those of the twin in plain Python, and whether there is a native one."""
        kind = self.find(name, reference=True)
        return {"native": self.find(name) is not kind, **self._facts(kind)}


POLICIES = _Policies(
    "eviction policy", EvictionPolicy, PolicyError, "sagellm.kv_policies", folder=f"{__package__}.eviction",
    num_given=1, aliases={"2q": "twoq"},
)  # fmt: skip
MIGRATIONS = Registry(
    "migration policy", MigrationPolicy, PolicyError, "sagellm.migration_policies", folder=f"{__package__}.migration"
)
LIFETIMES = Registry(
    "lifetime predictor", LifetimePredictor, PolicyError, "sagellm.lifetime_predictors", folder=f"{__package__}.lifetime"
)
policy_names, find_policy = POLICIES.names, POLICIES.find
migration_policy_names, find_migration_policy = MIGRATIONS.names, MIGRATIONS.find
lifetime_predictor_names, find_lifetime_predictor = LIFETIMES.names, LIFETIMES.find


def make_policy(name: str, capacity: int, reference: bool = False, **options: Any) -> EvictionPolicy:
    """Return a policy for a tier of `capacity` blocks. Raises PolicyError if the policy, capacity or options are invalid."""
    return POLICIES.make(find_policy(name, reference), name, capacity, **options)


def make_migration_policy(name: str, **options: Any) -> MigrationPolicy:
    """Return a migration policy. Raises PolicyError if it is unknown or its options are invalid."""
    return MIGRATIONS.make(find_migration_policy(name), name, **options)


def make_lifetime_predictor(name: str, **options: Any) -> LifetimePredictor:
    """Return a lifetime predictor. Raises PolicyError if it is unknown or its options are invalid."""
    return LIFETIMES.make(find_lifetime_predictor(name), name, **options)
