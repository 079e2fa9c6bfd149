"""The backend in memory: the contract of every backend, and its own faults."""

import pytest

from sagellm.core.errors import CapacityError, TierError
from sagellm.core.hooks import MigrationPlan, Tier
from sagellm.kv_runtime.simulated_backend import SimulatedBackend
from tests.kv_runtime.backend_contract import BackendContract

GPU, CPU, NVME = Tier.GPU, Tier.CPU, Tier.NVME
SIZES = {GPU: 4, CPU: 2, NVME: 2}


def filled(**options):
    backend = SimulatedBackend(SIZES, block_size=16, block_bytes=100, **options)
    backend.put((1, 2, 3))
    return backend


class TestContract(BackendContract):
    @pytest.fixture
    def backend(self):
        return filled()


def test_faults():
    backend = filled(fault=lambda call, key: f"{call} is broken" if key == 2 else None)
    assert backend.migrate(MigrationPlan(GPU, CPU, (1, 2))).refused == {2: "migrate is broken"}
    assert backend.save((2, 3), NVME, 1.0).result(0).refused == {2: "save is broken"}


def test_misuse():
    backend = filled()
    with pytest.raises(CapacityError, match="2 blocks for 1 free"):
        backend.put((4, 5))
    with pytest.raises(TierError, match="cannot migrate gpu -> nvme"):
        backend.migrate(MigrationPlan(GPU, NVME, (1,)))
    with pytest.raises(TierError, match="no tier cpu"):
        SimulatedBackend({GPU: 1}).drop(CPU, ())
    assert SimulatedBackend({GPU: 1}).capacity(CPU) == 0
