"""How many blocks of each tier a tenant may keep."""

from collections import Counter
from collections.abc import Mapping

from sagellm.core.errors import ConfigError
from sagellm.core.hooks import Tier

__all__ = ["QuotaManager"]


class QuotaManager:
    """Counts blocks by tenant and tier, and says who has too many. A tenant or a tier that is not named has no limit.

    Args:
        limits: tenant -> tier -> blocks (an integer, 0 to keep nothing) or share of the tier (above 0, below 1; rounded down).
        capacities: tier -> blocks, of the tiers that exist.

    Raises:
        ConfigError: an unknown tier, one that does not exist here, a value out of range, or shares above 1 together.
    """

    def __init__(self, limits: Mapping[str, Mapping[str, int | float]], capacities: Mapping[Tier, int]) -> None:
        self._limits: dict[tuple[str, Tier], int] = {}
        self._usage: Counter[tuple[str, Tier]] = Counter()
        self._violations: Counter[tuple[str, Tier]] = Counter()
        shares: Counter[Tier] = Counter()
        for tenant, by_tier in limits.items():
            for name, value in by_tier.items():
                tier = _tier(tenant, name, capacities)
                self._limits[tenant, tier] = _blocks(tenant, tier, value, capacities[tier])
                shares[tier] += value if isinstance(value, float) else 0
        for tier, share in shares.items():
            if share > 1 + 1e-9:
                raise ConfigError(
                    f"quotas give away {share:g} of tier {tier.value}; the shares of a tier are at most 1 together."
                )

    def charge(self, tenant_id: str, tier: Tier, count: int = 1) -> None:
        """Add blocks to what a tenant has; each one above its limit is a violation until room is made."""
        self._usage[tenant_id, tier] += count
        limit = self._limits.get((tenant_id, tier)) if self._limits else None
        if limit is not None and self._usage[tenant_id, tier] > limit:
            self._violations[tenant_id, tier] += min(count, self._usage[tenant_id, tier] - limit)

    def violations(self) -> dict[str, dict[str, int]]:
        """Return tier -> tenant -> blocks that came above the tenant's limit since the start; 0 for limits that held."""
        by_tier: dict[str, dict[str, int]] = {}
        for tenant, tier in self._limits:
            by_tier.setdefault(tier.value, {})[tenant] = self._violations[tenant, tier]
        return by_tier

    def release(self, tenant_id: str, tier: Tier, count: int = 1) -> None:
        self._usage[tenant_id, tier] -= count
        if not self._usage[tenant_id, tier]:
            del self._usage[tenant_id, tier]

    def limit(self, tenant_id: str, tier: Tier) -> int | None:
        """Blocks; None where there is no limit."""
        return self._limits.get((tenant_id, tier))

    def excess(self, tenant_id: str, tier: Tier, incoming: int = 0) -> int:
        """Blocks above its limit that the tenant has, or would have with `incoming` more."""
        limit = self._limits.get((tenant_id, tier))
        return 0 if limit is None else max(self._usage[tenant_id, tier] + incoming - limit, 0)

    def tenants(self, tier: Tier) -> list[str]:
        """Those that have a limit there, in order of the configuration."""
        return [tenant for tenant, on in self._limits if on is tier]


def _tier(tenant: str, name: str, capacities: Mapping[Tier, int]) -> Tier:
    known = ", ".join(tier.value for tier in capacities)
    try:
        tier = Tier(name)
    except ValueError:
        raise ConfigError(f"quota of tenant {tenant!r}: unknown tier {name!r}; tiers here are {known}.") from None
    if not capacities.get(tier):
        raise ConfigError(f"quota of tenant {tenant!r}: there is no tier {tier.value} here; tiers are {known}.")
    return tier


def _blocks(tenant: str, tier: Tier, value: int | float, capacity: int) -> int:
    if not isinstance(value, bool):
        if isinstance(value, int) and value >= 0:
            return value
        if isinstance(value, float) and 0 < value < 1:
            return int(value * capacity)
    raise ConfigError(
        f"quota of tenant {tenant!r} on {tier.value}: {value!r}; allowed are blocks (an integer from 0) or a share above 0 "
        "and below 1."
    )
