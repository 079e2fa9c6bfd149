"""The backend in memory: the contract of every backend, and its own clock and faults."""

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


class TestAtOnce(BackendContract):
    @pytest.fixture
    def backend(self):
        return filled()


class TestAtARate(BackendContract):
    @pytest.fixture
    def backend(self):
        return filled(bytes_per_s={(GPU, NVME): 50.0, (NVME, CPU): 100.0})

    def wait(self, backend, future):
        backend.advance(backend.now_s + 100.0)
        return future.result(timeout=0)


def test_copies_take_their_time_one_after_another():
    backend = filled(bytes_per_s={(GPU, NVME): 50.0})
    first, second = backend.save((1,), NVME, 10.0), backend.save((2,), NVME, 10.0)
    backend.advance(1.9)
    assert not first.done()
    backend.advance(2.0)
    assert first.done() and not second.done() and backend.num_free(NVME) == 0
    backend.advance(4.0)
    assert second.result(0).moved == (2,) and backend.moved_bytes[GPU, NVME] == 200
    backend.advance(1.0)
    assert backend.now_s == 4.0


def test_a_late_copy_is_refused_at_its_deadline():
    backend = filled(bytes_per_s={(GPU, NVME): 50.0})
    late, next_one = backend.save((1,), NVME, 1.5), backend.save((2,), NVME, 2.0)
    backend.advance(1.5)
    assert late.result(0).refused == {1: "deadline"} and backend.num_free(NVME) == 1
    backend.advance(2.0)
    assert next_one.result(0).moved == (2,), "what is late did not keep the others"


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
