"""Engines, nodes and managers that are killed at random moments lose no request that had sent no token."""

import pytest

from benchmarks.engine_kills import FAULTS, sweep


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "num_nodes"), [(24, 0), (6, 3)])
def test_a_few_kills(kills, num_nodes):
    """`benchmarks.engine_kills` makes 500."""
    found = sweep(kills, seed=3, manager_every=4, num_nodes=num_nodes, node_every=2)
    assert found["kills"] >= kills and found["managers"] >= 1 and found["answers"] > 50
    assert (found["nodes"] > 0) == (num_nodes > 0)
    assert not any(found[name] for name in FAULTS), found
