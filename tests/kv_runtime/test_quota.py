"""Quotas: what may be configured, and who has too many."""

import pytest

from sagellm.core.errors import ConfigError
from sagellm.core.hooks import Tier
from sagellm.kv_runtime.quota import QuotaManager

CAPACITIES = {Tier.GPU: 10, Tier.CPU: 40}


def test_limits_in_blocks_and_shares():
    quota = QuotaManager({"a": {"gpu": 3, "cpu": 0.26}, "b": {"gpu": 0}}, CAPACITIES)
    assert quota.limit("a", Tier.GPU) == 3 and quota.limit("a", Tier.CPU) == 10
    assert quota.limit("b", Tier.GPU) == 0 and quota.limit("b", Tier.CPU) is None and quota.limit("c", Tier.GPU) is None


def test_usage_and_excess():
    quota = QuotaManager({"a": {"gpu": 3}, "b": {"gpu": 1}}, CAPACITIES)
    quota.charge("a", Tier.GPU, 5)
    quota.charge("c", Tier.GPU, 100)
    assert quota.excess("a", Tier.GPU) == 2 and quota.excess("c", Tier.GPU) == 0
    assert quota.excess("b", Tier.GPU, incoming=3) == 2
    assert quota.tenants(Tier.GPU) == ["a", "b"] and quota.tenants(Tier.CPU) == []
    quota.release("a", Tier.GPU, 2)
    assert quota.excess("a", Tier.GPU) == 0


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"a": {"tape": 3}}, "unknown tier 'tape'; tiers here are gpu, cpu"),
        ({"a": {"nvme": 3}}, "no tier nvme here"),
        ({"a": {"gpu": -1}}, "-1; allowed are blocks"),
        ({"a": {"gpu": 1.5}}, "1.5; allowed are"),
        ({"a": {"gpu": 0.0}}, "0.0; allowed are"),
        ({"a": {"gpu": True}}, "True; allowed are"),
        ({"a": {"gpu": 0.6}, "b": {"gpu": 0.5}}, "1.1 of tier gpu"),
    ],
)
def test_bad_limits_are_refused(limits, why):
    with pytest.raises(ConfigError, match=why):
        QuotaManager(limits, CAPACITIES)
