"""A tenant that scans more than the pool holds, beside one that comes back, in the real engine."""

import numpy as np
import pytest

from sagellm.core.config import KVConfig
from sagellm.core.service import ServiceRequest
from tests.engines.lmdeploy.test_service import generate

RANDOM = np.random.default_rng(11)
GUEST = RANDOM.integers(3, 300, 100).tolist()
SCAN = [RANDOM.integers(3, 300, 100).tolist() for _ in range(12)]


def hits_of_the_guest(engine) -> int:
    """Tokens of its prompt that it finds again after the other one's scan."""
    generate(engine, ServiceRequest(tenant="guest"), prompt=GUEST)
    for prompt in SCAN:
        generate(engine, ServiceRequest(tenant="scanner"), prompt=prompt)
    before = engine.hooks.report()["prefix"]["hit_tokens"]
    generate(engine, ServiceRequest(tenant="guest"), prompt=GUEST)
    return engine.hooks.report()["prefix"]["hit_tokens"] - before


@pytest.mark.parametrize(("quotas", "expected"), [({}, 0), ({"scanner": {"gpu": 20}}, 96), ({"scanner": {"gpu": 0.5}}, 96)])
def test_a_quota_keeps_a_scan_from_what_others_have(start_engine, quotas, expected):
    engine = start_engine(kv_blocks=40, kv=KVConfig(policy="lru", quotas=quotas))
    assert hits_of_the_guest(engine) == expected
    (report,) = engine.hooks.report()["plugins"].values()
    assert set(report["blocks"]["gpu"]) == {"guest", "scanner"}
    assert bool(report["quota_violations"].get("gpu", {}).get("scanner")) == bool(quotas), report["quota_violations"]
