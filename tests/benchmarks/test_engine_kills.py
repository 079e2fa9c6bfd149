"""Engines and managers that are killed at random moments lose no request that had sent no token."""

import pytest

from benchmarks.engine_kills import FAULTS, sweep


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_few_kills():
    """`benchmarks.engine_kills` makes 500."""
    found = sweep(6, seed=3, manager_every=4)
    assert found["kills"] >= 6 and found["managers"] >= 1 and found["answers"] > 50
    assert not any(found[name] for name in FAULTS), found
