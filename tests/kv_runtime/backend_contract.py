"""The contract of `KVBackendProtocol`. To try a backend of your own, subclass `BackendContract` and bring the fixture."""

import pytest

from sagellm.core.hooks import MigrationPlan, Tier

GPU, CPU, NVME = Tier.GPU, Tier.CPU, Tier.NVME


class BackendContract:
    """`backend`: room for 4 blocks on gpu, 2 on cpu and 2 on nvme; gpu holds the blocks 1, 2 and 3, the others nothing.

    Override `wait` where futures do not end by themselves.
    """

    @pytest.fixture
    def backend(self):
        raise NotImplementedError

    def wait(self, backend, future):
        return future.result(timeout=60)

    def test_capacities_and_free_blocks(self, backend):
        assert [backend.capacity(tier) for tier in (GPU, CPU, NVME)] == [4, 2, 2]
        assert [backend.num_free(tier) for tier in (GPU, CPU, NVME)] == [1, 2, 2]
        assert backend.block_size > 0 and backend.block_bytes > 0

    def test_blocks_move_and_come_back(self, backend):
        assert backend.migrate(MigrationPlan(GPU, CPU, (3, 2))).moved == (3, 2)
        assert [backend.num_free(tier) for tier in (GPU, CPU)] == [3, 0]
        result = backend.migrate(MigrationPlan(CPU, GPU, (2,)))
        assert result.moved == (2,) and result.refused == {}

    def test_what_cannot_move_is_refused_with_a_reason_and_stays(self, backend):
        result = backend.migrate(MigrationPlan(GPU, CPU, (3, 9, 2, 1)))
        assert result.moved == (3, 2) and set(result.refused) == {9, 1} and all(result.refused.values())
        assert backend.num_free(GPU) == 3

    def test_what_is_dropped_makes_room_at_once(self, backend):
        backend.drop(GPU, (1, 2, 77))
        assert backend.num_free(GPU) == 3

    def test_a_saved_block_stays_where_it_is(self, backend):
        result = self.wait(backend, backend.save((1, 2, 3), NVME, 60.0))
        assert result.moved == (1, 2) and set(result.refused) == {3}
        assert backend.num_free(NVME) == 0 and backend.num_free(GPU) == 1

    def test_a_load_is_found_once_it_was_committed(self, backend):
        self.wait(backend, backend.save((1, 2), NVME, 60.0))
        backend.drop(GPU, (1, 2))
        loading = backend.load((1, 2, 8), CPU, 60.0)
        assert backend.num_free(CPU) == 0, "room is kept from the beginning"
        result = self.wait(backend, loading)
        assert result.moved == (1, 2) and set(result.refused) == {8}
        assert backend.migrate(MigrationPlan(CPU, GPU, (1,))).moved == (), "not committed yet"
        assert backend.commit_loads() == (1, 2) and backend.commit_loads() == ()
        assert backend.migrate(MigrationPlan(CPU, GPU, (1,))).moved == (1,)

    def test_what_is_not_moved_in_time_leaves_no_trace(self, backend):
        result = self.wait(backend, backend.save((1,), NVME, -1.0))
        assert result.moved == () and result.refused == {1: "deadline"}
        assert backend.num_free(NVME) == 2
